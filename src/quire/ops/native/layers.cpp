// All layers of a model in one call: a step of few rows runs hundreds of kernels, and the overhead of a caller in
// Python for each of them exceeds the running time of some.
//
// A layer consists of two halves over fixed buffers: norm, input projection, mixer, output projection with the
// residual; then norm, and a gated perceptron or experts with the residual. Where ranks share the layers, each half
// ends with the sum of what all ranks give.
#include "attention_plan.h"
#include "experts.h"
#include "linear_call.h"
#include "parallel.h"
#include "rank_group.h"
#include "states.h"

using quire::AttentionPlan;

QUIRE_EXPORT void quire_rms_norm(int64_t type, const void* x, int64_t row_stride, int64_t weight_type,
                                 const void* weight, float eps, int64_t num_rows, int64_t width, void* output);
QUIRE_EXPORT void quire_prepare(const StepRows* rows, const Cache* cache, int64_t layer, const void* qkv,
                                int64_t weight_type, const void* weights, int64_t num_normed, float eps,
                                const void* cos, const void* sin, int64_t num_heads, void* queries);
QUIRE_EXPORT void quire_attend(const StepRows* rows, const Cache* cache, AttentionPlan* plan, int64_t layer,
                               const void* queries, int64_t row_stride, float scale, float soft_cap, const float* sinks,
                               void* output);
QUIRE_EXPORT void quire_sigmoid_gate(Type type, const void* x, const void* gates, int64_t num_rows, int64_t width,
                                     void* output);
QUIRE_EXPORT void quire_short_conv(Type type, const StateRows* rows, const StateCache* cache, int64_t layer,
                                   const ShortConv* mixer, const void* projected, void* output);
QUIRE_EXPORT void quire_gated_delta_net(Type type, const StateRows* rows, const StateCache* cache, int64_t layer,
                                        const GatedDeltaNet* net, const void* projected, void* output);
QUIRE_EXPORT void quire_experts(Type type, const Experts* experts, int64_t num_rows, const void* x, const void* routed,
                                const void* start, void* output);

namespace {

// Scales of a norm, or of the norms of a layer's heads.
struct Norm {
  int64_t type;
  const void* scales;
  int64_t num_heads;  // for norms of heads: number of normed heads, from the first on
  double eps;
};

// Attention between its projections.
struct Attention {
  Norm head_norms;
  int64_t rotation_idx;
  int64_t num_heads;
  double score_scale;
  double soft_cap;     // 0 for none
  const float* sinks;  // [num_heads], or null
  Linear gate;         // projection to gates of the heads' outputs; without a kernel where there are none
};

// A layer. It has one of the mixers, the others are null; without experts it has a gated perceptron.
struct Layer {
  Norm mixer_norm;
  Linear input;
  const Attention* attention;
  const ShortConv* short_conv;
  const GatedDeltaNet* delta_net;
  int64_t group_idx;
  int64_t layer_idx;  // index in the cache group
  Linear output;
  Norm ffn_norm;
  const Experts* experts;
  Linear gate_up;
  Linear down;
};

// Arguments of a step for one cache group: of tokens, or of states, which have no plan.
struct GroupStep {
  const void* rows;
  const void* cache;
  AttentionPlan* plan;
};

// Cosines and sines of a step's rows.
struct Rotation {
  const void* cos;
  const void* sin;
};

// Buffers of a step, each for all rows. Results that are not needed at the same time share a buffer.
struct Buffers {
  void* normed;   // normed hidden states; also the output of the mixer
  void* product;  // results of input projections; gated columns
  void* queries;
  void* gates;    // of attention
  void* between;  // hidden states between the halves of a layer
  void* hidden;   // hidden states between layers, and the result
};

// A step of some rows.
struct Step {
  Type type;
  int64_t num_rows;
  const GroupStep* groups;
  const Rotation* rotations;
  Buffers buffers;
  quire::RankGroup* ranks;  // null where there is one rank

  void norm(const Norm& norm, const void* x, int64_t width) const {
    quire_rms_norm(int64_t(type), x, width, norm.type, norm.scales, float(norm.eps), num_rows, width, buffers.normed);
  }

  void attend(const Layer& layer) const {
    const Attention& attention = *layer.attention;
    const GroupStep& group = groups[layer.group_idx];
    const auto* const rows = static_cast<const StepRows*>(group.rows);
    const auto* const cache = static_cast<const Cache*>(group.cache);
    const Rotation& rotation = rotations[attention.rotation_idx];
    const Norm& norms = attention.head_norms;
    const bool is_gated = attention.gate.kernel != nullptr;
    if (is_gated) attention.gate(type, buffers.normed, num_rows, nullptr, buffers.gates);
    quire_prepare(rows, cache, layer.layer_idx, buffers.product, norms.type, norms.scales, norms.num_heads,
                  float(norms.eps), rotation.cos, rotation.sin, attention.num_heads, buffers.queries);
    const int64_t width = layer.output.width;
    quire_attend(rows, cache, group.plan, layer.layer_idx, buffers.queries, width, float(attention.score_scale),
                 float(attention.soft_cap), attention.sinks, buffers.normed);
    if (is_gated) quire_sigmoid_gate(type, buffers.normed, buffers.gates, num_rows, width, buffers.normed);
  }

  void mix(const Layer& layer) const {
    if (layer.attention != nullptr) return attend(layer);
    const GroupStep& group = groups[layer.group_idx];
    const auto* const rows = static_cast<const StateRows*>(group.rows);
    const auto* const cache = static_cast<const StateCache*>(group.cache);
    if (layer.short_conv != nullptr)
      quire_short_conv(type, rows, cache, layer.layer_idx, layer.short_conv, buffers.product, buffers.normed);
    else
      quire_gated_delta_net(type, rows, cache, layer.layer_idx, layer.delta_net, buffers.product, buffers.normed);
  }

  // Adds what `part(residual, output)` gives to `x`; of ranks, what all of them give.
  template <typename Part>
  quire::Status add(const void* x, int64_t width, void* output, Part part) const {
    if (ranks == nullptr) {
      part(x, output);
      return 0;
    }
    quire::Status status = quire::begin(*ranks);
    if (status != 0) return status;
    part(nullptr, slot_of(*ranks, ranks->rank));
    with_type(type, [&](auto* as) {
      using T = std::remove_pointer_t<decltype(as)>;
      status = quire::end_sum(*ranks, num_rows * width, static_cast<const T*>(x), static_cast<T*>(output));
    });
    return status;
  }

  quire::Status run(const Layer& layer, const void* x) const {
    const int64_t width = layer.input.width;
    norm(layer.mixer_norm, x, width);
    layer.input(type, buffers.normed, num_rows, nullptr, buffers.product);
    mix(layer);
    const quire::Status status = add(x, width, buffers.between, [&](const void* residual, void* output) {
      layer.output(type, buffers.normed, num_rows, residual, output);
    });
    if (status != 0) return status;
    norm(layer.ffn_norm, buffers.between, width);
    return add(buffers.between, width, buffers.hidden, [&](const void* residual, void* output) {
      if (layer.experts != nullptr)
        return quire_experts(type, layer.experts, num_rows, buffers.normed, buffers.normed, residual, output);
      layer.gate_up(type, buffers.normed, num_rows, nullptr, buffers.product);
      layer.down(type, buffers.product, num_rows, residual, output);
    });
  }
};

}  // namespace

// The end of a model: a norm of rows `x` [num_rows, width], `row_stride` values apart, and the product of its result.
// The normed rows are written to `normed` [num_rows, width].
QUIRE_EXPORT void quire_normed_linear(Type type, const Norm* norm, const Linear* linear, int64_t num_rows,
                                      const void* x, int64_t row_stride, void* normed, void* output) {
  quire_rms_norm(int64_t(type), x, row_stride, norm->type, norm->scales, float(norm->eps), num_rows, linear->width,
                 normed);
  (*linear)(type, normed, num_rows, nullptr, output);
}

// Runs layers over hidden states `x` [num_rows, width] of a type. The threads stay together for all kernels.
// Returns the status of the ranks that share the layers, 0 where `ranks` is null.
QUIRE_EXPORT int64_t quire_layers(Type type, const Layer* layers, int64_t num_layers, int64_t num_rows,
                                  const GroupStep* groups, const Rotation* rotations, const void* x,
                                  const Buffers* buffers, quire::RankGroup* ranks) {
  const Step step{type, num_rows, groups, rotations, *buffers, ranks};
  quire::Status status = 0;
  quire::together([&] {
    const void* from = x;
    for (const Layer* layer = layers; layer < layers + num_layers && status == 0; ++layer, from = buffers->hidden)
      status = step.run(*layer, from);
  });
  return status;
}
