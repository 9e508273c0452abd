// Recurrent mixers between their projections, for sequences with few rows in a step: convolutions over stored inputs,
// recurrences token by token, norms and gates, all in one parallel region.
//
// Sums are in float32. Results between operations are rounded as if each operation stored its rows, so that the bits
// are near to those of torch_states.py. A sequence gets the same bits whatever other sequences the step has, and
// however its rows are divided among steps of this kind.
#include "states.h"

#include <cmath>
#include <vector>

#include "activation_functions.h"
#include "norms.h"
#include "parallel.h"

namespace {

constexpr int64_t kJobChannels = 256;  // channels of a short convolution that a job computes
constexpr int kPanelVectors = kRegisters / 4;  // vectors of a state's columns that are updated at once
constexpr float kLengthEps = 1e-6f;    // added to the squared length of queries and keys

// A sequence of the step and its states in one layer.
template <typename T>
struct Sequence {
  Sequence(const StateRows& rows, const StateCache& cache, int64_t layer, int64_t seq)
      : first_row(rows.first_rows[seq]),
        num_rows(rows.num_rows[seq]),
        num_columns(cache.num_columns),
        has_state(rows.has_state[seq] != 0),
        conv_state(cache.conv_state<T>(rows.block_ids[seq], layer)),
        ssm_state(cache.ssm_state(rows.block_ids[seq], layer)) {}

  const int64_t first_row;
  const int64_t num_rows;
  const int64_t num_columns;
  const bool has_state;
  T* const conv_state;
  float* const ssm_state;
};

// Returns memory of this thread for `count` values, until the next call with the same tag.
template <typename T, int kTag>
T* scratch(int64_t count) {
  thread_local std::vector<T> values;
  if (int64_t(values.size()) < count) values.resize(count);
  return values.data();
}

// Convolves `count` channels from `first` on, and stores the last inputs. `read(row, to)` gives the inputs of a row.
// The outputs [num_rows, count] are floats, rounded to the type of the rows; kIsActivated: after a silu.
template <bool kIsActivated, typename T, typename Read>
void convolve(const Sequence<T>& sequence, const Convolution& conv, int64_t first, int64_t count, Read read,
              float* output) {
  const int64_t num_columns = sequence.num_columns, num_rows = sequence.num_rows;
  T* const inputs = scratch<T, 0>((num_columns + num_rows) * count);
  T* const stored = sequence.conv_state + first;
  for (int64_t column = 0; column < num_columns; ++column) {
    if (sequence.has_state)
      std::copy_n(stored + column * conv.num_channels, count, inputs + column * count);
    else
      std::fill_n(inputs + column * count, count, T{});
  }
  for (int64_t row = 0; row < num_rows; ++row) read(row, inputs + (num_columns + row) * count);
  for (int64_t column = 0; column < num_columns; ++column)
    std::copy_n(inputs + (num_rows + column) * count, count, stored + column * conv.num_channels);
  const float* const bias = conv.bias == nullptr ? nullptr : conv.bias + first;
  for (int64_t row = 0; row < num_rows; ++row) {
    const T* const from = inputs + row * count;
    float* const to = output + row * count;
    const auto sums_of_taps = [&](auto get, auto sum) {
      for (int64_t tap = 0; tap <= num_columns; ++tap)
        sum += get(from + tap * count) * get(conv.taps + tap * conv.num_channels + first);
      return bias == nullptr ? sum : sum + get(bias);
    };
    const auto finished = [](Floats sum) { return rounded<T>(kIsActivated ? activated<Silu>(sum) : sum); };
    int64_t idx = 0;
    for (; idx + kLanes <= count; idx += kLanes)
      store(to + idx, finished(sums_of_taps([=](const auto* values) { return load(values + idx); }, Floats{})));
    for (; idx < count; ++idx)
      to[idx] = finished(splat(sums_of_taps([=](const auto* values) { return widen(values[idx]); }, 0.0f)))[0];
  }
}

template <typename T>
void convolve_gated(const Sequence<T>& sequence, const ShortConv& mixer, int64_t first, const T* projected,
                    T* output) {
  const int64_t num_channels = mixer.conv.num_channels, count = std::min(kJobChannels, num_channels - first);
  const auto row_at = [=, &sequence](int64_t row) {
    return projected + (sequence.first_row + row) * 3 * num_channels + first;
  };
  const auto multiply = [=](const auto* a, const auto* b, T* to) {
    int64_t idx = 0;
    for (; idx + kLanes <= count; idx += kLanes) store(to + idx, load(a + idx) * load(b + idx));
    for (; idx < count; ++idx) narrow(to + idx, widen(a[idx]) * widen(b[idx]));
  };
  float* const convolved = scratch<float, 1>(sequence.num_rows * count);
  const auto read = [&](int64_t row, T* to) { multiply(row_at(row), row_at(row) + 2 * num_channels, to); };
  convolve<false>(sequence, mixer.conv, first, count, read, convolved);
  for (int64_t row = 0; row < sequence.num_rows; ++row)
    multiply(convolved + row * count, row_at(row) + num_channels,
             output + (sequence.first_row + row) * num_channels + first);
}

float dot(const float* a, const float* b, int64_t count) {
  Floats sums{};
  int64_t idx = 0;
  for (; idx + kLanes <= count; idx += kLanes) sums += load(a + idx) * load(b + idx);
  float sum = sum_of(sums)[0];
  for (; idx < count; ++idx) sum += a[idx] * b[idx];
  return sum;
}

// Divides a vector by its length, and multiplies it by a factor.
void make_unit(float* values, int64_t count, float factor) {
  factor /= std::sqrt(dot(values, values, count) + kLengthEps);
  for (int64_t idx = 0; idx < count; ++idx) values[idx] *= factor;
}

// A head's row of the gated delta rule.
struct DeltaRow {
  const float* q;  // [key_dim]
  const float* k;  // [key_dim]
  const float* v;  // of the head's first column
  float* y;        // of the head's first column
  float q_dot_k;
  float decay;
  float beta;
};

// Updates columns of a state [key_dim, ...] with a row, and reads from them.
template <int kVectors>
QUIRE_INLINE void correct(const DeltaRow& row, int64_t key_dim, const float* v, float* y, float* state,
                          int64_t stride) {
  Floats found[kVectors]{}, read[kVectors]{};
  for (int64_t idx = 0; idx < key_dim; ++idx)
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) {
      const Floats values = load(state + idx * stride + n * kLanes);
      found[n] += values * row.k[idx];
      read[n] += values * row.q[idx];
    }
  Floats deltas[kVectors];
#pragma GCC unroll 8
  for (int n = 0; n < kVectors; ++n) {
    deltas[n] = (load(v + n * kLanes) - found[n] * row.decay) * row.beta;
    store(y + n * kLanes, read[n] * row.decay + deltas[n] * row.q_dot_k);
  }
  for (int64_t idx = 0; idx < key_dim; ++idx)
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) {
      float* const at = state + idx * stride + n * kLanes;
      store(at, load(at) * row.decay + deltas[n] * row.k[idx]);
    }
}

// Updates the last columns of a state, fewer than a vector, in a copy with whole vectors.
void correct_last(const DeltaRow* rows, int64_t num_rows, int64_t key_dim, int64_t column, int64_t count, float* state,
                  int64_t stride) {
  float* const copy = scratch<float, 2>(key_dim * kLanes);
  for (int64_t idx = 0; idx < key_dim; ++idx) {
    std::copy_n(state + idx * stride + column, count, copy + idx * kLanes);
    std::fill(copy + idx * kLanes + count, copy + (idx + 1) * kLanes, 0.0f);
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    float v[kLanes]{}, y[kLanes];
    std::copy_n(rows[row].v + column, count, v);
    correct<1>(rows[row], key_dim, v, y, copy, kLanes);
    std::copy_n(y, count, rows[row].y + column);
  }
  for (int64_t idx = 0; idx < key_dim; ++idx)
    std::copy_n(copy + idx * kLanes, count, state + idx * stride + column);
}

// Updates a head's state [key_dim, value_dim] with all rows. Columns depend on no others, so that some of them take all
// rows while they are in the first-level cache.
void correct_state(const DeltaRow* rows, int64_t num_rows, int64_t key_dim, int64_t value_dim, float* state) {
  int64_t column = 0;
  const auto correct_columns = [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    for (; column + kVectors * kLanes <= value_dim; column += kVectors * kLanes)
      for (int64_t row = 0; row < num_rows; ++row)
        correct<kVectors>(rows[row], key_dim, rows[row].v + column, rows[row].y + column, state + column, value_dim);
  };
  correct_columns(std::integral_constant<int, kPanelVectors>());
  correct_columns(std::integral_constant<int, 1>());
  if (column < value_dim) correct_last(rows, num_rows, key_dim, column, value_dim - column, state, value_dim);
}

// Norms a head's output, and gates it.
template <typename T>
void norm_and_gate(const float* y, const T* gates, const float* scales, float eps, int64_t width, T* output) {
  const float inverse = inverse_rms(y, width, eps);
  int64_t idx = 0;
  for (; idx + kLanes <= width; idx += kLanes)
    store(output + idx, activated<Silu>(load(gates + idx)) * (load(y + idx) * inverse * load(scales + idx)));
  for (; idx < width; ++idx)
    narrow(output + idx, activated<Silu>(splat(widen(gates[idx])))[0] * (y[idx] * inverse * scales[idx]));
}

// Computes the heads that share a key head: its channels are convolved by nobody else.
template <typename T>
class KeyHead {
 public:
  KeyHead(const Sequence<T>& sequence, const GatedDeltaNet& net, int64_t key_head, const T* projected, T* output)
      : sequence_(sequence),
        net_(net),
        key_head_(key_head),
        num_shared_(net.num_heads / net.num_key_heads),
        row_width_(net.conv.num_channels + net.num_heads * (net.value_dim + 2)),
        projected_(projected + sequence.first_row * row_width_),
        output_(output + sequence.first_row * net.num_heads * net.value_dim) {}

  void run() {
    const int64_t num_rows = sequence_.num_rows, key_dim = net_.key_dim, value_dim = net_.value_dim;
    const int64_t width = num_shared_ * value_dim, keys = net_.num_key_heads * key_dim;
    float* const q = scratch<float, 1>(num_rows * (2 * key_dim + width + value_dim));
    float *const k = q + num_rows * key_dim, *const v = k + num_rows * key_dim, *const y = v + num_rows * width;
    convolve_channels(key_head_ * key_dim, key_dim, q);
    convolve_channels(keys + key_head_ * key_dim, key_dim, k);
    convolve_channels(2 * keys + key_head_ * width, width, v);
    DeltaRow* const rows = scratch<DeltaRow, 3>(num_rows);
    for (int64_t row = 0; row < num_rows; ++row) {
      float *const query = q + row * key_dim, *const key = k + row * key_dim;
      make_unit(query, key_dim, 1.0f / std::sqrt(float(key_dim)));
      make_unit(key, key_dim, 1.0f);
      rows[row] = {query, key, nullptr, y + row * value_dim, dot(query, key, key_dim), 0.0f, 0.0f};
    }
    for (int64_t idx = 0; idx < num_shared_; ++idx) run_head(idx, v + idx * value_dim, width, rows);
  }

 private:
  void convolve_channels(int64_t first, int64_t count, float* output) {
    const auto read = [&](int64_t row, T* to) { std::copy_n(projected_ + row * row_width_ + first, count, to); };
    convolve<true>(sequence_, net_.conv, first, count, read, output);
  }

  void run_head(int64_t idx, const float* values, int64_t stride, DeltaRow* rows) {
    const int64_t head = key_head_ * num_shared_ + idx, value_dim = net_.value_dim;
    const int64_t gates = net_.conv.num_channels, rates = gates + net_.num_heads * value_dim + head;
    for (int64_t row = 0; row < sequence_.num_rows; ++row) {
      const T* const from = projected_ + row * row_width_ + rates;
      const float beta = widen(from[0]), dt = widen(from[net_.num_heads]) + net_.dt_bias[head];
      rows[row].v = values + row * stride;
      rows[row].beta = 1.0f / (1.0f + std::exp(-beta));
      const float softplus = dt > 20.0f ? dt : std::log1p(std::exp(dt));
      rows[row].decay = std::exp(softplus * net_.decay_rates[head]);
    }
    float* const state = sequence_.ssm_state + head * net_.key_dim * value_dim;
    if (!sequence_.has_state) std::fill_n(state, net_.key_dim * value_dim, 0.0f);
    correct_state(rows, sequence_.num_rows, net_.key_dim, value_dim, state);
    for (int64_t row = 0; row < sequence_.num_rows; ++row)
      norm_and_gate(rows[row].y, projected_ + row * row_width_ + gates + head * value_dim, net_.norm_scales,
                    float(net_.norm_eps), value_dim, output_ + (row * net_.num_heads + head) * value_dim);
  }

  const Sequence<T>& sequence_;
  const GatedDeltaNet& net_;
  const int64_t key_head_;
  const int64_t num_shared_;
  const int64_t row_width_;
  const T* const projected_;
  T* const output_;
};

}  // namespace

// Writes the rows of `output` [all rows, channels] that belong to the sequences; `projected` has all rows of the step.
QUIRE_EXPORT void quire_short_conv(Type type, const StateRows* rows, const StateCache* cache, int64_t layer,
                                   const ShortConv* mixer, const void* projected, void* output) {
  const int64_t num_parts = (mixer->conv.num_channels + kJobChannels - 1) / kJobChannels;
  with_type(type, [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    quire::in_turns(rows->num_seqs * num_parts, [&](int64_t job) {
      const Sequence<T> sequence(*rows, *cache, layer, job / num_parts);
      convolve_gated(sequence, *mixer, job % num_parts * kJobChannels, static_cast<const T*>(projected),
                     static_cast<T*>(output));
    });
  });
}

// As above; the output is [all rows, num_heads * value_dim].
QUIRE_EXPORT void quire_gated_delta_net(Type type, const StateRows* rows, const StateCache* cache, int64_t layer,
                                        const GatedDeltaNet* net, const void* projected, void* output) {
  with_type(type, [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    quire::in_turns(rows->num_seqs * net->num_key_heads, [&](int64_t job) {
      const Sequence<T> sequence(*rows, *cache, layer, job / net->num_key_heads);
      KeyHead<T>(sequence, *net, job % net->num_key_heads, static_cast<const T*>(projected), static_cast<T*>(output))
          .run();
    });
  });
}
