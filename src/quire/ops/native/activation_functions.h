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
enum class Activation : int64_t { kNone = 0, kSilu = 1, kGeluTanh = 2, kSwigluOai = 3 };

// The activations, each defined by the exponent z of x / (1 + e^-z), and by what x and the factor beside it become
// before that.
struct Unchanged {
  static QUIRE_INLINE Floats gate(Floats x) { return x; }
  static QUIRE_INLINE Floats factor(Floats up) { return up; }
};

struct Silu : Unchanged {
  static QUIRE_INLINE Floats exponent(Floats x) { return x; }
};

// x (1 + tanh(y)) / 2 = x / (1 + e^-2y), with y = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh : Unchanged {
  static QUIRE_INLINE Floats exponent(Floats x) { return x * (x * x * 0.0713548162726f + 1.5957691216057308f); }
};

// min(x, 7) sigmoid(1.702 min(x, 7)), beside clamp(up, -7, 7) + 1.
struct SwigluOai {
  static QUIRE_INLINE Floats exponent(Floats x) { return x * 1.702f; }
  static QUIRE_INLINE Floats gate(Floats x) { return x > 7.0f ? splat(7.0f) : x; }
  static QUIRE_INLINE Floats factor(Floats up) {
    const Floats below = gate(up);
    return (below < -7.0f ? splat(-7.0f) : below) + 1.0f;
  }
};

QUIRE_INLINE Floats sigmoid(Floats x) { return 1.0f / (exponential(-x) + 1.0f); }

template <typename Form>
QUIRE_INLINE Floats activated(Floats x) {
  const Floats gate = Form::gate(x);
  return gate / (exponential(-Form::exponent(gate)) + 1.0f);
}

}  // namespace
