// Experts of a layer as the caller describes them.
#pragma once

#include "lora.h"

namespace {

struct Expert {
  Linear gate_up;
  Linear down;
};

// Experts of a layer. A missing linear layer has no kernel, a missing vector is null. Experts of other ranks are
// missing: they are chosen as the others are, and what they give is left out.
struct Experts {
  Linear router;
  const float* choice_bias;    // [num_experts]
  const float* expert_scales;  // [num_experts]
  const Expert* experts;
  int64_t num_experts;
  int64_t num_chosen;
  int64_t is_sigmoid;       // scores are sigmoids, not a softmax
  int64_t is_renormalised;  // the chosen scores are divided by their sum
  int64_t is_input_scaled;  // scores multiply what experts see, not what they give
  double sum_eps;
  double score_scale;
  double logit_scale;
  Expert shared;
  Linear shared_gate;
  // Adapters of the layers of each expert of this rank, null where these take none; the slot of an expert's is
  // slot of the adapter * num_local + expert - first_local.
  const LoraTable* gate_up_adapters;
  const LoraTable* down_adapters;
  const StepAdapters* step_adapters;
  int64_t first_local;
  int64_t num_local;
};

}  // namespace
