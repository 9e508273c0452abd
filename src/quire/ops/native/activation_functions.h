// Activation functions of gates, and rounding between operations.
#pragma once

#include "vec.h"

namespace {

// Returns values as if stored and loaded again: a model with two operations rounds twice.
template <typename T>
QUIRE_INLINE Floats rounded(Floats values) {
  T memory[kLanes];
  store(memory, values);
  return load(memory);
}

template <>
QUIRE_INLINE Floats rounded<float>(Floats values) {
  return values;
}

template <typename T>
QUIRE_INLINE float rounded(float value) {
  T memory;
  narrow(&memory, value);
  return widen(memory);
}

// The values of `ACTIVATIONS` in native_library.py.
enum class Activation : int64_t { kNone = 0, kSilu = 1, kGeluTanh = 2 };

// The activations, each defined by the exponent z of x / (1 + e^-z).
struct Silu {
  static QUIRE_INLINE Floats exponent(Floats x) { return x; }
};

// x (1 + tanh(y)) / 2 = x / (1 + e^-2y), with y = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  static QUIRE_INLINE Floats exponent(Floats x) { return x * (x * x * 0.0713548162726f + 1.5957691216057308f); }
};

template <typename Form>
QUIRE_INLINE Floats activated(Floats x) {
  return x / (exponential(-Form::exponent(x)) + 1.0f);
}

}  // namespace
