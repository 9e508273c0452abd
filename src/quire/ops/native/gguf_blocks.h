// Blocks of GGUF files, unpacked to the codes, scales and minima that forms of weights have.
//
// One function for each type of blocks; quire/models/gguf/block_types.py has their twins in torch, with which they are
// compared byte by byte.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "vec.h"

namespace {

// Unpacked rows; see `QuantizedRows` in quire/ops/interface/quantized_weight.py.
struct UnpackedRows {
  const uint8_t* codes;
  const void* scales;
  const void* mins;
  const uint8_t* zero_points;
  const uint16_t* super_scales;
  const uint16_t* super_mins;
};

// Where a block is unpacked to: its codes; the scales and minima of its groups; its super-scale and super-minimum.
struct UnpackedBlock {
  uint8_t* codes;
  uint8_t* scales;
  uint8_t* mins;
  uint8_t* super_scale;
  uint8_t* super_min;
};

// A type of blocks: its number in a file, the values and bytes of a block, the bytes of its groups' scales and minima
// (0 without), and a function that unpacks blocks which follow each other.
struct BlockType {
  int64_t id;
  int num_values, num_bytes, scale_bytes, min_bytes;
  void (*unpack)(const uint8_t* blocks, int64_t count, UnpackedBlock to);
};

// Unpacks one block.
using Unpack = void (*)(const uint8_t* block, const UnpackedBlock& to);

// A type whose blocks are unpacked one after the other: a call for each of 32 values would take longer than the values.
template <Unpack kUnpack, int kValues, int kBytes, int kScaleBytes, int kMinBytes>
constexpr BlockType block_type(int64_t id) {
  return {id, kValues, kBytes, kScaleBytes, kMinBytes, [](const uint8_t* blocks, int64_t count, UnpackedBlock to) {
            for (int64_t idx = 0; idx < count; ++idx, blocks += kBytes) {
              kUnpack(blocks, to);
              to = {to.codes + kValues, to.scales + kScaleBytes, to.mins + kMinBytes, to.super_scale + 2,
                    to.super_min + 2};
            }
          }};
}

// Some bytes as a vector: what compilers make of loops over bytes depends on all that is around.
template <int kCount>
struct VectorOf {
  typedef uint8_t Octets __attribute__((vector_size(kCount)));
};

template <int kCount>
using Octets = typename VectorOf<kCount>::Octets;

// The bytes of a register, at most of 32 bytes.
constexpr int kOctets = 4 * kLanes < 32 ? 4 * kLanes : 32;

// Calls `body(vector, first)` for each vector of some bytes, with the index of its first byte.
template <int kCount, typename Body>
QUIRE_INLINE void for_vectors(const uint8_t* from, Body body) {
  constexpr int kPart = kCount < kOctets ? kCount : kOctets;
#pragma GCC unroll 4
  for (int first = 0; first < kCount; first += kPart) body(load_bits<Octets<kPart>>(from + first), first);
}

// Adds the bits of bytes, shifted to a place, to the codes at `to`.
template <typename Vector>
QUIRE_INLINE void add_bytes(Vector bytes, int place, uint8_t* to) {
  store_bits(to, load_bits<Vector>(to) | bytes << place);
}

// The low halves of some bytes, then the high halves.
template <int kCount>
QUIRE_INLINE void put_halves(const uint8_t* from, uint8_t* to) {
  for_vectors<kCount>(from, [&](auto bytes, int first) {
    store_bits(to + first, bytes & 15);
    store_bits(to + kCount + first, bytes >> 4);
  });
}

// Quarters of some bytes, the lowest of all bytes first.
template <int kCount>
QUIRE_INLINE void put_quarters(const uint8_t* from, uint8_t* to) {
  for_vectors<kCount>(from, [&](auto bytes, int first) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) store_bits(to + part * kCount + first, bytes >> 2 * part & 3);
  });
}

// Adds quarters of 32 bytes at a place to 128 codes, in the same order.
QUIRE_INLINE void add_quarters(const uint8_t* from, int place, uint8_t* to) {
  for_vectors<32>(from, [&](auto bytes, int first) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) add_bytes(bytes >> 2 * part & 3, place, to + part * 32 + first);
  });
}

// Adds the bits of 32 bytes to 256 codes at a place: the lowest bits of all bytes to the first 32 codes, and so on.
QUIRE_INLINE void add_bits(const uint8_t* from, int place, uint8_t* to) {
  for_vectors<32>(from, [&](auto bytes, int first) {
#pragma GCC unroll 8
    for (int bit = 0; bit < 8; ++bit) add_bytes(bytes >> bit & 1, place, to + bit * 32 + first);
  });
}

inline void put_float16(const uint8_t* from, uint8_t* to) { std::memcpy(to, from, 2); }

inline void put_negated(const uint8_t* from, uint8_t* to) {
  to[0] = from[0];
  to[1] = from[1] ^ 0x80;
}

QUIRE_INLINE void unpack_q4_0(const uint8_t* block, const UnpackedBlock& to) {
  put_float16(block, to.scales);
  put_halves<16>(block + 2, to.codes);
}

QUIRE_INLINE void unpack_q4_1(const uint8_t* block, const UnpackedBlock& to) {
  put_float16(block, to.scales);
  put_negated(block + 2, to.mins);
  put_halves<16>(block + 4, to.codes);
}

// Codes of five bits: 4 bytes with the fifth bit of each, then 16 with the others.
QUIRE_INLINE void put_five_bits(const uint8_t* from, uint8_t* to) {
  put_halves<16>(from + 4, to);
#pragma GCC unroll 4
  for (int octet = 0; octet < 4; ++octet) {
    // Byte k of a word of eight keeps bit k; any bit carries into the highest of its byte, and from there to the fifth.
    const uint64_t one_of_eight = (from[octet] * 0x0101010101010101) & 0x8040201008040201;
    const uint64_t fifth = ((one_of_eight + 0x7f7f7f7f7f7f7f7f) & 0x8080808080808080) >> 3;
    store_bits(to + octet * 8, load_bits<uint64_t>(to + octet * 8) | fifth);
  }
}

QUIRE_INLINE void unpack_q5_0(const uint8_t* block, const UnpackedBlock& to) {
  put_float16(block, to.scales);
  put_five_bits(block + 2, to.codes);
}

QUIRE_INLINE void unpack_q5_1(const uint8_t* block, const UnpackedBlock& to) {
  put_float16(block, to.scales);
  put_negated(block + 2, to.mins);
  put_five_bits(block + 4, to.codes);
}

// Signed bytes plus 128: the same bytes with their highest bit changed.
QUIRE_INLINE void put_bytes(const uint8_t* from, uint8_t* to) {
  for_vectors<32>(from, [&](auto bytes, int first) { store_bits(to + first, bytes ^ 128); });
}

QUIRE_INLINE void unpack_q8_0(const uint8_t* block, const UnpackedBlock& to) {
  put_float16(block, to.scales);
  put_bytes(block + 2, to.codes);
}

QUIRE_INLINE void unpack_q2_k(const uint8_t* block, const UnpackedBlock& to) {
  for (int group = 0; group < 16; ++group) {
    to.scales[group] = block[group] & 15;
    to.mins[group] = block[group] >> 4;
  }
  for (int half = 0; half < 2; ++half) put_quarters<32>(block + 16 + half * 32, to.codes + half * 128);
  put_float16(block + 80, to.super_scale);
  put_float16(block + 82, to.super_min);
}

QUIRE_INLINE void unpack_q3_k(const uint8_t* block, const UnpackedBlock& to) {
  for (int half = 0; half < 2; ++half) put_quarters<32>(block + 32 + half * 32, to.codes + half * 128);
  add_bits(block, 2, to.codes);
  // A code of three bits has the offset 4; codes of four bits have the offset 8.
  for_vectors<256>(to.codes, [&](auto bytes, int first) { store_bits(to.codes + first, bytes + 4); });
  uint8_t high[16];
  put_halves<8>(block + 96, to.scales);
  put_quarters<4>(block + 104, high);
  for (int group = 0; group < 16; ++group) to.scales[group] = uint8_t((to.scales[group] | high[group] << 4) - 32);
  put_float16(block + 108, to.super_scale);
}

// What Q4_K and Q5_K begin with: super-scale, super-minimum, and 12 bytes with 8 scales and 8 minima of 6 bits. The low
// bits of 8 bytes are 4 scales and 4 minima; their high 2 bits belong to the others, whose low 4 bits come last.
inline void put_factors(const uint8_t* block, const UnpackedBlock& to) {
  put_float16(block, to.super_scale);
  put_float16(block + 2, to.super_min);
  const uint8_t *first = block + 4, *last = block + 12;
  for (int idx = 0; idx < 4; ++idx) {
    to.scales[idx] = first[idx] & 63;
    to.mins[idx] = first[4 + idx] & 63;
    to.scales[4 + idx] = (last[idx] & 15) | first[idx] >> 6 << 4;
    to.mins[4 + idx] = last[idx] >> 4 | first[4 + idx] >> 6 << 4;
  }
}

QUIRE_INLINE void unpack_q4_k(const uint8_t* block, const UnpackedBlock& to) {
  put_factors(block, to);
  for (int pair = 0; pair < 4; ++pair) put_halves<32>(block + 16 + pair * 32, to.codes + pair * 64);
}

QUIRE_INLINE void unpack_q5_k(const uint8_t* block, const UnpackedBlock& to) {
  put_factors(block, to);
  for (int pair = 0; pair < 4; ++pair) put_halves<32>(block + 48 + pair * 32, to.codes + pair * 64);
  add_bits(block + 16, 4, to.codes);
}

QUIRE_INLINE void unpack_q6_k(const uint8_t* block, const UnpackedBlock& to) {
  for (int half = 0; half < 2; ++half) {
    uint8_t* codes = to.codes + half * 128;
    put_halves<64>(block + half * 64, codes);
    add_quarters(block + 128 + half * 32, 4, codes);
  }
  std::memcpy(to.scales, block + 192, 16);
  put_float16(block + 208, to.super_scale);
}

QUIRE_INLINE void unpack_iq4_xs(const uint8_t* block, const UnpackedBlock& to) {
  put_float16(block, to.super_scale);
  uint8_t scales[8], *codes = to.codes;
  for (int group = 0; group < 8; ++group) {
    const int low = block[4 + group / 2] >> 4 * (group % 2) & 15, high = block[2 + group / 4] >> 2 * (group % 4) & 3;
    scales[group] = uint8_t((low | high << 4) - 32);
  }
  std::memcpy(to.scales, scales, sizeof(scales));
#pragma GCC unroll 8
  for (int group = 0; group < 8; ++group) put_halves<16>(block + 8 + group * 16, codes + group * 32);
}

QUIRE_INLINE void unpack_mxfp4(const uint8_t* block, const UnpackedBlock& to) {
  // Half of 2^(e - 127) as bfloat16, since levels are doubled; below e = 2 that is a subnormal number.
  const int exponent = block[0];
  const uint16_t scale = uint16_t(exponent < 2 ? 0x20 << exponent : (exponent - 1) << 7);
  std::memcpy(to.scales, &scale, sizeof(scale));
  put_halves<16>(block + 1, to.codes);
}

constexpr BlockType kBlockTypes[] = {
    block_type<unpack_q4_0, 32, 18, 2, 0>(2),  // Q4_0
    block_type<unpack_q4_1, 32, 20, 2, 2>(3),  // Q4_1
    block_type<unpack_q5_0, 32, 22, 2, 0>(6),  // Q5_0
    block_type<unpack_q5_1, 32, 24, 2, 2>(7),  // Q5_1
    block_type<unpack_q8_0, 32, 34, 2, 0>(8),  // Q8_0
    block_type<unpack_q2_k, 256, 84, 16, 16>(10),  // Q2_K
    block_type<unpack_q3_k, 256, 110, 16, 0>(11),  // Q3_K
    block_type<unpack_q4_k, 256, 144, 8, 8>(12),  // Q4_K
    block_type<unpack_q5_k, 256, 176, 8, 8>(13),  // Q5_K
    block_type<unpack_q6_k, 256, 210, 16, 0>(14),  // Q6_K
    block_type<unpack_q4_0, 32, 18, 2, 0>(20),  // IQ4_NL
    block_type<unpack_iq4_xs, 256, 136, 8, 0>(23),  // IQ4_XS
    block_type<unpack_mxfp4, 32, 17, 2, 0>(39),  // MXFP4
};

inline const BlockType* block_type_of(int64_t id) {
  for (const BlockType& type : kBlockTypes)
    if (type.id == id) return &type;
  return nullptr;
}

// Rows of blocks, `row_bytes` apart; `index` names the rows of a weight among them, and is null where they follow each
// other.
struct BlockRows {
  int64_t type_id;
  const uint8_t* blocks;
  int64_t row_bytes;
  const int64_t* index;
};

// Unpacks some rows of blocks at a time; each thread has its own.
class BlockUnpacker {
 public:
  BlockUnpacker(const BlockRows& rows, int64_t width, int max_rows)
      : rows_(rows), type_(*block_type_of(rows.type_id)), num_blocks_(width / type_.num_values) {
    const int64_t count = max_rows * num_blocks_;
    codes_.resize(count * type_.num_values);
    scales_.resize(count * type_.scale_bytes);
    mins_.resize(count * type_.min_bytes);
    super_scales_.resize(count);
    super_mins_.resize(count);
  }

  // Returns rows that follow each other, the first of which is row 0 of the result.
  UnpackedRows unpack(int64_t first, int num_rows) {
    for (int row = 0; row < num_rows; ++row) {
      const int64_t from = rows_.index == nullptr ? first + row : rows_.index[first + row];
      const int64_t at = row * num_blocks_;
      type_.unpack(rows_.blocks + from * rows_.row_bytes, num_blocks_,
                   {codes_.data() + at * type_.num_values, scales_.data() + at * type_.scale_bytes,
                    mins_.data() + at * type_.min_bytes, reinterpret_cast<uint8_t*>(super_scales_.data() + at),
                    reinterpret_cast<uint8_t*>(super_mins_.data() + at)});
    }
    return {codes_.data(), scales_.data(), mins_.data(), nullptr, super_scales_.data(), super_mins_.data()};
  }

 private:
  BlockRows rows_;
  const BlockType& type_;
  int64_t num_blocks_;
  std::vector<uint8_t> codes_, scales_, mins_;
  std::vector<uint16_t> super_scales_, super_mins_;
};

}  // namespace
