// Experts of a layer as the caller describes them.
#pragma once

#include "linear_call.h"

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
};

}  // namespace
