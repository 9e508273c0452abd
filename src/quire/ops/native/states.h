// Structures that the caller fills in for recurrent mixers: the rows of a step, the states, and the weights.
#pragma once

#include "cache.h"

namespace {

// Sequences of a step with their states. Rows of other sequences may lie between theirs.
struct StateRows {
  int64_t num_seqs;
  const int64_t* block_ids;   // [num_seqs]
  const int64_t* first_rows;  // [num_seqs]
  const int64_t* num_rows;    // [num_seqs], positive
  const int64_t* has_state;   // [num_seqs]; 0: no token came before the rows, and the block may hold anything
};

// The states of a cache group; see PagedStates in interface.py. Strides are in bytes.
struct StateCache {
  char* conv_states;  // of the first block and layer: [num_columns, channels] of the rows' type
  char* ssm_states;   // of the first block and layer: a matrix of floats for each head
  int64_t block_stride;
  int64_t layer_stride;
  int64_t num_columns;

  template <typename T>
  T* conv_state(int64_t block_id, int64_t layer) const {
    return reinterpret_cast<T*>(conv_states + block_id * block_stride + layer * layer_stride);
  }
  float* ssm_state(int64_t block_id, int64_t layer) const {
    return reinterpret_cast<float*>(ssm_states + block_id * block_stride + layer * layer_stride);
  }
};

// A causal convolution of each channel by itself.
struct Convolution {
  const float* taps;  // [num_columns + 1, num_channels], the tap of the row itself last
  const float* bias;  // [num_channels], or null
  int64_t num_channels;
};

// Rows are projected to | b | c | values |; the convolution's inputs are b * values, and c multiplies its outputs.
struct ShortConv {
  Convolution conv;
};

// Rows are projected to | queries, keys, values | gates | beta | dt |; the first three are convolved.
struct GatedDeltaNet {
  Convolution conv;
  const float* decay_rates;  // [num_heads], negative
  const float* dt_bias;      // [num_heads]
  const float* norm_scales;  // [value_dim]
  double norm_eps;
  int64_t num_key_heads;
  int64_t num_heads;
  int64_t key_dim;
  int64_t value_dim;
};

}  // namespace
