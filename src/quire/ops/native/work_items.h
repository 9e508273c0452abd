// Numbers of work items of attention on a GPU, and how tokens are cut into these; see `ops/triton/attention/splits.py`.
#pragma once

#include <algorithm>

#include "cache.h"

namespace {

// Numbers of an item, of a split row, of an item of shared tokens and of a row of these.
constexpr int64_t kItem = 8, kSplitRow = 4, kSharedItem = 8, kSharedRow = 4;
// The table of an item of shared tokens, and the place of a row of these.
constexpr int64_t kSharedTable = 2, kSharedPlace = 1;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How tokens are cut into splits.
struct SplitRule {
  int64_t tile_tokens;
  int64_t num_kv_heads;
  int64_t num_programs;  // programs that are wanted
  int64_t min_split;     // tokens of the shortest split

  // Returns the number of tokens of a split, where all sequences have `num_tokens`.
  int64_t length(int64_t num_tokens) const {
    const int64_t share = ceil_div(num_tokens * num_kv_heads, num_programs);
    return std::max(min_split, ceil_div(share, tile_tokens) * tile_tokens);
  }
};

}  // namespace
