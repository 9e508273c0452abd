// Operations on the rows of hidden states between the matrix products: norms, rotations, gates, and the store of keys
// and values.
#include "activation_functions.h"
#include "cache.h"
#include "norms.h"
#include "parallel.h"

namespace {

// Number of values that justifies a second thread.
constexpr int64_t kGrain = 1 << 14;

int64_t rows_per_grain(int64_t width) { return kGrain / width + 1; }

// Scales in the type of the weights: with float weights, nothing is rounded before the store.
template <typename T, typename W>
QUIRE_INLINE void normalise(const T* row, const W* weight, float eps, int64_t width, T* output) {
  const float inverse = inverse_rms(row, width, eps);
  int64_t idx = 0;
  for (; idx + kLanes <= width; idx += kLanes)
    store(output + idx, rounded<W>(load(row + idx) * inverse) * load(weight + idx));
  for (; idx < width; ++idx) narrow(output + idx, rounded<W>(widen(row[idx]) * inverse) * widen(weight[idx]));
}

// Calls `body` with null pointers of the rows' type and of the weights' type, which is the same or float.
template <typename Body>
void with_types(Type type, Type weight_type, Body body) {
  with_type(type, [&](auto* as) {
    if (weight_type == type)
      body(as, as);
    else
      body(as, static_cast<float*>(nullptr));
  });
}

// Rotates the halves of a head against each other. The first half of `sin` is negated.
template <typename T>
QUIRE_INLINE void rotate(const T* head, const T* cos, const T* sin, int64_t half, T* output) {
  int64_t idx = 0;
  for (; idx + kLanes <= half; idx += kLanes) {
    const Floats first = load(head + idx), second = load(head + half + idx);
    store(output + idx, first * load(cos + idx) + second * load(sin + idx));
    store(output + half + idx, second * load(cos + half + idx) + first * load(sin + half + idx));
  }
  for (; idx < half; ++idx) {
    const float first = widen(head[idx]), second = widen(head[half + idx]);
    narrow(output + idx, first * widen(cos[idx]) + second * widen(sin[idx]));
    narrow(output + half + idx, second * widen(cos[half + idx]) + first * widen(sin[half + idx]));
  }
}

template <typename Form, typename T>
QUIRE_INLINE void gate(const T* gates, const T* ups, int64_t width, T* output) {
  int64_t idx = 0;
  for (; idx + kLanes <= width; idx += kLanes)
    store(output + idx, rounded<T>(activated<Form>(load(gates + idx))) * Form::factor(load(ups + idx)));
  for (; idx < width; ++idx)
    narrow(output + idx, rounded<T>(activated<Form>(splat(widen(gates[idx])))[0]) *
                             Form::factor(splat(widen(ups[idx])))[0]);
}

// The output may be `x` itself.
template <typename T>
QUIRE_INLINE void apply_sigmoids(const T* x, const T* gates, int64_t width, T* output) {
  int64_t idx = 0;
  for (; idx + kLanes <= width; idx += kLanes)
    store(output + idx, load(x + idx) * rounded<T>(sigmoid(load(gates + idx))));
  for (; idx < width; ++idx)
    narrow(output + idx, widen(x[idx]) * rounded<T>(sigmoid(splat(widen(gates[idx]))))[0]);
}

template <typename Form>
void gate_rows(int64_t type, const void* gate_up, int64_t num_rows, int64_t width, void* output) {
  with_type(static_cast<Type>(type), [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    quire::in_parallel(num_rows, rows_per_grain(width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gates = static_cast<const T*>(gate_up) + row * 2 * width;
        gate<Form>(gates, gates + width, width, static_cast<T*>(output) + row * width);
      }
    });
  });
}

// Arguments of the preparation of each row's heads for attention.
struct Heads {
  const void* qkv;      // [rows, query heads + 2 KV heads, head dim]
  const void* weights;  // scales of the heads' norms, [normed heads, head dim]
  const void* cos;      // [rows, head dim]
  const void* sin;
  void* queries;  // [rows, query heads, head dim]
  int64_t num_heads;
  int64_t num_normed;  // number of normed heads, from a row's first on: 0, all but the values, or all
  float eps;
};

template <typename T, typename W>
void prepare(const StepRows& rows, const Cache& cache, int64_t layer, const Heads& heads, int64_t row) {
  const int64_t head_dim = cache.head_dim, num_heads = heads.num_heads, num_kv_heads = cache.num_kv_heads;
  const T* from = static_cast<const T*>(heads.qkv) + row * (num_heads + 2 * num_kv_heads) * head_dim;
  const W* weights = static_cast<const W*>(heads.weights);
  const T* cos = static_cast<const T*>(heads.cos) + row * head_dim;
  const T* sin = static_cast<const T*>(heads.sin) + row * head_dim;
  T* queries = static_cast<T*>(heads.queries) + row * num_heads * head_dim;
  const int64_t block = rows.slot_mapping[row] / cache.block_size, offset = rows.slot_mapping[row] % cache.block_size;
  alignas(64) T normed[kMaxDim], turned[kMaxDim];
  for (int64_t head = 0; head < num_heads + num_kv_heads; ++head, from += head_dim) {
    const T* source = from;
    if (head < heads.num_normed) {
      normalise(from, weights + head * head_dim, heads.eps, head_dim, normed);
      source = normed;
    }
    const bool is_query = head < num_heads;
    T* to = is_query             ? queries + head * head_dim
            : cache.is_quantised ? turned
                                 : cache.slot<T>(block, layer, 0, head - num_heads, offset);
    rotate(source, cos, sin, head_dim / 2, to);
    if (!is_query && cache.is_quantised)
      quantise(turned, head_dim, cache.slot<int8_t>(block, layer, 0, head - num_heads, offset));
  }
  for (int64_t head = 0; head < num_kv_heads; ++head, from += head_dim) {
    T* slot = cache.slot<T>(block, layer, 1, head, offset);
    const int64_t idx = num_heads + num_kv_heads + head;
    const bool is_normed = idx < heads.num_normed;
    if (is_normed) normalise(from, weights + idx * head_dim, heads.eps, head_dim, cache.is_quantised ? normed : slot);
    if (cache.is_quantised)
      quantise(is_normed ? normed : from, head_dim, cache.slot<int8_t>(block, layer, 1, head, offset));
    else if (!is_normed)
      std::memcpy(static_cast<void*>(slot), from, head_dim * sizeof(T));
  }
}

}  // namespace

// Divides each row [width] by its root mean square, then scales it by `weight` [width] of the same type or of float.
QUIRE_EXPORT void quire_rms_norm(int64_t type, const void* x, int64_t row_stride, int64_t weight_type,
                                 const void* weight, float eps, int64_t num_rows, int64_t width, void* output) {
  with_types(static_cast<Type>(type), static_cast<Type>(weight_type), [&](auto* as, auto* weight_as) {
    using T = std::remove_pointer_t<decltype(as)>;
    using W = std::remove_pointer_t<decltype(weight_as)>;
    quire::in_parallel(num_rows, rows_per_grain(width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        normalise(static_cast<const T*>(x) + row * row_stride, static_cast<const W*>(weight), eps, width,
                  static_cast<T*>(output) + row * width);
    });
  });
}

// Multiplies the second half of each row [2 * width] by the activation of the first.
QUIRE_EXPORT void quire_gate(int64_t type, Activation activation, const void* gate_up, int64_t num_rows, int64_t width,
                             void* output) {
  const auto run = activation == Activation::kSilu       ? gate_rows<Silu>
                   : activation == Activation::kGeluTanh ? gate_rows<GeluTanh>
                                                         : gate_rows<SwigluOai>;
  run(type, gate_up, num_rows, width, output);
}

// Multiplies each row [width] by the sigmoids of its gates, rounded like a stored row.
QUIRE_EXPORT void quire_sigmoid_gate(Type type, const void* x, const void* gates, int64_t num_rows, int64_t width,
                                     void* output) {
  with_type(type, [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    quire::in_parallel(num_rows, rows_per_grain(width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t start = row * width;
        apply_sigmoids(static_cast<const T*>(x) + start, static_cast<const T*>(gates) + start, width,
                       static_cast<T*>(output) + start);
      }
    });
  });
}

// Norms the first heads of each row, rotates its query and key heads, and stores its keys and values in its slot of the
// cache. For a cache without heads, rows consist of queries only.
QUIRE_EXPORT void quire_prepare(const StepRows* rows, const Cache* cache, int64_t layer, const void* qkv,
                                int64_t weight_type, const void* weights, int64_t num_normed, float eps,
                                const void* cos, const void* sin, int64_t num_heads, void* queries) {
  const Heads heads{qkv, weights, cos, sin, queries, num_heads, num_normed, eps};
  const int64_t num_rows = rows->row_starts[rows->num_seqs];
  const int64_t width = (num_heads + 2 * cache->num_kv_heads) * cache->head_dim;
  with_types(cache->type, static_cast<Type>(weight_type), [&](auto* as, auto* weight_as) {
    using T = std::remove_pointer_t<decltype(as)>;
    using W = std::remove_pointer_t<decltype(weight_as)>;
    quire::in_parallel(num_rows, rows_per_grain(width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) prepare<T, W>(*rows, *cache, layer, heads, row);
    });
  });
}
