// Masks of logits: one bit per token, set where a row may sample the token.
#include "cache.h"
#include "parallel.h"
#include "vec.h"

namespace {

constexpr int64_t kWordBits = 32;
// Words of a row that one job processes, and number of jobs that justifies a second thread.
constexpr int64_t kJobWords = 256;
constexpr int64_t kGrain = 8;

// Sets the logits of 32 tokens to minus infinity where their bits are 0.
QUIRE_INLINE void keep_word(float* logits, uint32_t bits) {
  const Floats none = splat(-kInfinity);
#if defined(__AVX512F__)
  // A masked store does not read the logits.
  _mm512_mask_storeu_ps(logits, __mmask16(~bits), (__m512)none);
  _mm512_mask_storeu_ps(logits + 16, __mmask16(~bits >> 16), (__m512)none);
#else
  Ints lane_bits;
  for (int lane = 0; lane < kLanes; ++lane) lane_bits[lane] = 1 << lane;
  for (int place = 0; place < kWordBits; place += kLanes) {
    const Ints is_kept = ((Ints{} + int32_t(bits >> place)) & lane_bits) != 0;
    store(logits + place, is_kept ? load(logits + place) : none);
  }
#endif
}

// Does the same for the last `count` logits of a row, fewer than 32.
void keep_tail(float* logits, uint32_t bits, int64_t count) {
  for (int64_t idx = 0; idx < count; ++idx)
    if (!(bits >> idx & 1)) logits[idx] = -kInfinity;
}

void keep_words(float* logits, int64_t num_tokens, const uint32_t* mask, int64_t begin, int64_t end) {
  for (int64_t word = begin; word < end; ++word) {
    const uint32_t bits = mask[word];
    const int64_t count = num_tokens - word * kWordBits;
    if (bits == ~uint32_t(0)) continue;
    if (count >= kWordBits)
      keep_word(logits + word * kWordBits, bits);
    else
      keep_tail(logits + word * kWordBits, bits, count);
  }
}

}  // namespace

// Sets the logits of the given rows to minus infinity, except for tokens whose bits are set. The lowest bit belongs to
// the first token; `masks` has one pointer for each of the rows.
QUIRE_EXPORT void quire_keep_tokens(float* logits, int64_t row_stride, int64_t num_tokens, const int64_t* rows,
                                    int64_t num_rows, const uint32_t* const* masks) {
  const int64_t num_words = (num_tokens + kWordBits - 1) / kWordBits;
  const int64_t num_parts = (num_words + kJobWords - 1) / kJobWords;
  quire::in_parallel(num_rows * num_parts, kGrain, [&](int64_t first, int64_t last) {
    for (int64_t job = first; job < last; ++job) {
      const int64_t entry = job / num_parts, begin = job % num_parts * kJobWords;
      keep_words(logits + rows[entry] * row_stride, num_tokens, masks[entry], begin,
                 std::min(num_words, begin + kJobWords));
    }
  });
}
