// A linear layer as the caller describes it to kernels that run several.
#pragma once

#include "activation_functions.h"
#include "cache.h"

namespace {

// A linear layer with weights of any format. Formats differ in the kernel and in the structure that `packed` points to.
struct Linear {
  using Kernel = void (*)(Type type, const void* x, int64_t row_stride, int64_t num_rows, const void* packed,
                          int64_t num_columns, int64_t width, const void* bias, const void* residual, Activation gate,
                          void* output);

  Kernel kernel;
  const void* packed;
  int64_t num_columns;
  int64_t width;
  const void* bias;
  Activation gate;

  void operator()(Type type, const void* x, int64_t num_rows, const void* residual, void* output) const {
    kernel(type, x, width, num_rows, packed, num_columns, width, bias, residual, gate, output);
  }
};

}  // namespace
