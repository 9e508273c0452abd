// Structures that the caller fills in to describe a step and the cache.
#pragma once

#include <cstdint>

#include "vec.h"

#define QUIRE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kMaxDim = 256;  // maximum head dimension

enum class Type : int64_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// Calls `body` with a null pointer to the C++ type of `type`.
template <typename Body>
void with_type(Type type, Body body) {
  switch (type) {
    case Type::kFloat32: body(static_cast<float*>(nullptr)); break;
    case Type::kFloat16: body(static_cast<Float16*>(nullptr)); break;
    case Type::kBFloat16: body(static_cast<BFloat16*>(nullptr)); break;
  }
}

// Rows and block tables of a step in one cache group; see AttentionBatch in interface.py.
struct StepRows {
  int64_t num_seqs;
  const int64_t* row_starts;    // [num_seqs + 1]
  const int64_t* context_lens;  // [num_seqs]
  const int64_t* block_starts;  // [num_seqs + 1]
  const int64_t* block_ids;
  const int64_t* slot_mapping;  // slot of each row
};

// The cache of one group: a slot [block, layer, key or value, KV head, offset] holds a vector of `head_dim` values.
// Strides are in bytes.
struct Cache {
  void* data;
  Type type;             // type of the rows, and of the slots unless they are quantised
  int64_t is_quantised;  // slots hold int8 values, followed by their float32 scale
  int64_t block_stride;
  int64_t layer_stride;
  int64_t slot_bytes;
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t head_dim;

  // Returns the slot of a token at `offset` of a block, for keys (`kv` 0) or values (`kv` 1).
  template <typename T>
  T* slot(int64_t block_id, int64_t layer, int64_t kv, int64_t head, int64_t offset) const {
    const int64_t row = (kv * num_kv_heads + head) * block_size + offset;
    char* const start = static_cast<char*>(data) + block_id * block_stride + layer * layer_stride;
    return reinterpret_cast<T*>(start + row * slot_bytes);
  }
};

// Integer for the largest magnitude of a quantised vector.
constexpr float kLargest = 127.0f;
// A vector without a larger magnitude counts as zeros, so that neither a scale nor a quotient is ever subnormal.
constexpr float kLeast = 1e-36f;

// Stores a vector as int8 and the scale that restores it. A vector with a NaN or an infinity is restored as NaN.
template <typename T>
QUIRE_INLINE void quantise(const T* from, int64_t count, int8_t* slot) {
  const float reach = largest_magnitude(from, count);
  const float scale = reach <= kLeast ? 0.0f : reach / kLargest;
  const float divisor = scale == 0.0f ? 1.0f : scale;
  int64_t idx = 0;
  for (; idx + kLanes <= count; idx += kLanes) store(slot + idx, load(from + idx) / divisor);
  for (; idx < count; ++idx) narrow(slot + idx, widen(from[idx]) / divisor);
  store_bits(slot + count, scale);
}

}  // namespace
