// The plan of a step's attention, made once for all layers: which query rows are computed together with which tokens.
//
//   query_tile   query rows of one sequence, at most `kRows`
//   split        the part of a query tile's context between two cuts
//   job          splits with the same tokens in the same blocks, of one or more query tiles; the tokens are read once
//
//   context of query_tile 0   |<-- shared by 0, 1, 2 -->|<-- shared by 0, 1 -->|<-- its own -->|
//   context of query_tile 1   |<-- shared by 0, 1, 2 -->|<-- shared by 0, 1 -->|<-- its own ------->|
//   context of query_tile 2   |<-- shared by 0, 1, 2 -->|<-- its own -->|
//
// The partial results of a query tile's splits are merged in the order of its context. All KV heads use the same jobs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace quire {

constexpr int kRows = 128;            // maximum number of query rows of a job
constexpr int64_t kPartTokens = 512;  // contexts are cut at multiples of this length

// Range of tokens that rows see.
struct MaskRange {
  int64_t window;  // number of tokens that a row sees, itself included; 0: all
  int64_t chunk;   // length of a chunk, in which a row sees the tokens up to itself; 0: no chunks

  // Returns the position of the first token that a row at `position` sees; it never decreases as positions grow.
  int64_t first_seen(int64_t position) const {
    if (chunk > 0) return position / chunk * chunk;
    return window > 0 && position >= window ? position + 1 - window : 0;
  }
};

// Rows are ordered by token, and within a token by query head of the group.
struct QueryTile {
  int64_t seq;
  int64_t first_row;  // index among the sequence's rows
  int64_t num_rows;
  int64_t num_splits;  // number of splits with stored partial results; 0: a single job computes the final result
  int64_t first_slot;  // first slot of the partial results, which are ordered by split, then by row
};

struct KVSplit {
  int64_t query_tile;
  int64_t idx;  // index among the query tile's splits

  int64_t slot(const std::vector<QueryTile>& query_tiles) const {
    return query_tiles[query_tile].first_slot + idx * query_tiles[query_tile].num_rows;
  }
};

// Every row of a job sees at least one token of [begin, end), and no token outside of it is read.
struct Job {
  int64_t begin;
  int64_t end;
  int64_t first_split;
  int64_t num_splits;
  int64_t first_beside;  // first of the jobs over mostly the same tokens, this job included
  int64_t num_beside;
};

struct AttentionPlan {
  int64_t group;  // number of query heads per KV head
  MaskRange mask;
  bool is_deterministic;
  std::vector<QueryTile> query_tiles;
  std::vector<KVSplit> splits;
  std::vector<Job> jobs;
  int64_t num_slots = 0;  // number of slots of partial results for one KV head

  // Calls `body(job, KV head)` for index `idx` among all jobs of all heads. Jobs over the same tokens are consecutive
  // for one head before the next head begins, so that their keys and values stay in the cache.
  template <typename Body>
  void at(int64_t idx, int64_t num_heads, Body body) const {
    const Job& near = jobs[idx / num_heads];
    const int64_t place = idx - near.first_beside * num_heads;
    body(jobs[near.first_beside + place % near.num_beside], place / near.num_beside);
  }

  // Partial results of all KV heads, [heads, slots] each; every layer overwrites those of the layer before.
  std::unique_ptr<float[]> sums;  // [heads, slots, head dim]
  std::unique_ptr<float[]> largest;
  std::unique_ptr<float[]> total;
};

}  // namespace quire
