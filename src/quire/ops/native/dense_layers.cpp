// All layers of a dense model in one call: a step of few rows runs hundreds of kernels, and the overhead of a caller in
// Python for each of them exceeds the running time of some.
//
// A layer consists of two halves over fixed buffers: norm, projection to queries, keys and values, rotation and store,
// attention, output projection with the residual; then norm, gated projection, down projection with the residual.
#include "attention_plan.h"
#include "linear_call.h"
#include "parallel.h"

using quire::AttentionPlan;

QUIRE_EXPORT void quire_rms_norm(int64_t type, const void* x, int64_t row_stride, int64_t weight_type,
                                 const void* weight, float eps, int64_t num_rows, int64_t width, void* output);
QUIRE_EXPORT void quire_prepare(const StepRows* rows, const Cache* cache, int64_t layer, const void* qkv,
                                int64_t weight_type, const void* weights, int64_t num_normed, float eps,
                                const void* cos, const void* sin, int64_t num_heads, void* queries);
QUIRE_EXPORT void quire_attend(const StepRows* rows, const Cache* cache, AttentionPlan* plan, int64_t layer,
                               const void* queries, int64_t row_stride, float scale, const float* sinks, void* output);

namespace {

// Scales of a norm, or of the norms of a layer's heads.
struct Norm {
  int64_t type;
  const void* scales;
  int64_t num_heads;  // for norms of heads: number of normed heads, from the first on
  double eps;
};

struct DenseLayer {
  Norm mixer_norm;
  Linear qkv;
  Norm head_norms;
  int64_t rotation_idx;
  int64_t group_idx;
  int64_t layer_idx;  // index in the cache group
  int64_t num_heads;
  double score_scale;
  const float* sinks;  // [num_heads], or null
  Linear output;
  Norm ffn_norm;
  Linear gate_up;
  Linear down;
};

// Arguments of a step for one cache group.
struct GroupStep {
  const StepRows* rows;
  const Cache* cache;
  AttentionPlan* plan;
};

// Cosines and sines of a step's rows.
struct Rotation {
  const void* cos;
  const void* sin;
};

// Buffers of a step, each for all rows. Results that are not needed at the same time share a buffer.
struct Buffers {
  void* normed;   // normed hidden states; also the output of attention
  void* product;  // queries, keys and values; gated columns
  void* queries;
  void* between;  // hidden states between the halves of a layer
  void* hidden;   // hidden states between layers, and the result
};

void run(Type type, const DenseLayer& layer, int64_t num_rows, const GroupStep& step, const Rotation& rotation,
         const void* x, const Buffers& buffers) {
  const auto norm = [=](const Norm& norm, const void* from, int64_t width) {
    quire_rms_norm(int64_t(type), from, width, norm.type, norm.scales, float(norm.eps), num_rows, width,
                   buffers.normed);
  };
  norm(layer.mixer_norm, x, layer.qkv.width);
  layer.qkv(type, buffers.normed, num_rows, nullptr, buffers.product);
  const Norm& heads = layer.head_norms;
  quire_prepare(step.rows, step.cache, layer.layer_idx, buffers.product, heads.type, heads.scales, heads.num_heads,
                float(heads.eps), rotation.cos, rotation.sin, layer.num_heads, buffers.queries);
  quire_attend(step.rows, step.cache, step.plan, layer.layer_idx, buffers.queries, layer.output.width,
               float(layer.score_scale), layer.sinks, buffers.normed);
  layer.output(type, buffers.normed, num_rows, x, buffers.between);
  norm(layer.ffn_norm, buffers.between, layer.gate_up.width);
  layer.gate_up(type, buffers.normed, num_rows, nullptr, buffers.product);
  layer.down(type, buffers.product, num_rows, buffers.between, buffers.hidden);
}

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
QUIRE_EXPORT void quire_dense_layers(Type type, const DenseLayer* layers, int64_t num_layers, int64_t num_rows,
                                     const GroupStep* steps, const Rotation* rotations, const void* x,
                                     const Buffers* buffers) {
  quire::together([=] {
    const void* from = x;
    for (const DenseLayer* layer = layers; layer < layers + num_layers; ++layer, from = buffers->hidden)
      run(type, *layer, num_rows, steps[layer->group_idx], rotations[layer->rotation_idx], from, *buffers);
  });
}
