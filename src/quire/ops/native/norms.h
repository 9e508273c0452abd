// The root mean square of a row, which norms divide by.
#pragma once

#include "vec.h"

namespace {

// Returns the factor that makes the root mean square of a row one.
template <typename T>
QUIRE_INLINE float inverse_rms(const T* row, int64_t width, float eps) {
  Floats squares{};
  int64_t idx = 0;
  for (; idx + kLanes <= width; idx += kLanes) {
    const Floats values = load(row + idx);
    squares += values * values;
  }
  float sum = sum_of(squares)[0];
  for (; idx < width; ++idx) sum += widen(row[idx]) * widen(row[idx]);
  return 1.0f / __builtin_sqrtf(sum / float(width) + eps);
}

}  // namespace
