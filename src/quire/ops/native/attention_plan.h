// What is computed of a step's attention, made once for all layers: which query rows meet which tokens in one go.
//
//   strip   query rows of one sequence, as many as a job takes
//   piece   what a strip sees of its context from one cut to the next
//   job     pieces of the same tokens in the same blocks, of one strip or of several: what is read once
//
//   context of strip 0   |<-- shared by 0, 1, 2 -->|<-- shared by 0, 1 -->|<-- its own -->|
//   context of strip 1   |<-- shared by 0, 1, 2 -->|<-- shared by 0, 1 -->|<-- its own ------->|
//   context of strip 2   |<-- shared by 0, 1, 2 -->|<-- its own -->|
//
// What the pieces of a strip give is joined in the order of its context. All KV heads go through the same jobs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace quire {

constexpr int kRows = 128;         // query rows of a job, at most
constexpr int64_t kPartTokens = 512;  // contexts are cut at multiples of it

// How far back rows see.
struct Sight {
  int64_t window;  // tokens that a row sees, itself included; 0: all
  int64_t chunk;   // a row sees its own chunk of so many tokens, up to itself; 0: no chunks

  // The first token that a row at `position` sees; never falls as positions grow.
  int64_t first_seen(int64_t position) const {
    if (chunk > 0) return position / chunk * chunk;
    return window > 0 && position >= window ? position + 1 - window : 0;
  }
};

// Rows are counted token by token, and within a token by the head of the group.
struct Strip {
  int64_t seq;
  int64_t first_row;   // of the sequence's
  int64_t num_rows;
  int64_t num_pieces;  // whose results are kept until all are there; 0: the strip is one job's, which finishes it
  int64_t first_slot;  // where they are kept: piece by piece, row by row
};

struct Piece {
  int64_t strip;
  int64_t idx;  // among the strip's

  int64_t slot(const std::vector<Strip>& strips) const {
    return strips[strip].first_slot + idx * strips[strip].num_rows;
  }
};

// All of its rows see something of [begin, end), and nobody reads past either end.
struct Job {
  int64_t begin;
  int64_t end;
  int64_t first_piece;
  int64_t num_pieces;
  int64_t first_beside;  // of the jobs over much the same tokens, itself among them
  int64_t num_beside;
};

struct AttentionPlan {
  int64_t group;  // query heads of a KV head
  Sight sight;
  bool is_deterministic;
  std::vector<Strip> strips;
  std::vector<Piece> pieces;
  std::vector<Job> jobs;
  int64_t num_slots = 0;  // of kept results, for one KV head

  // Calls `body(job, KV head)` with what comes at place `idx` of all jobs of all heads. Jobs over the same tokens follow
  // each other for one head before the next head comes, so that what they read stays in the cache.
  template <typename Body>
  void at(int64_t idx, int64_t num_heads, Body body) const {
    const Job& near = jobs[idx / num_heads];
    const int64_t place = idx - near.first_beside * num_heads;
    body(jobs[near.first_beside + place % near.num_beside], place / near.num_beside);
  }

  // The kept results of all KV heads, [heads, slots] of each. Layers use them one after the other.
  std::unique_ptr<float[]> sums;  // [heads, slots, head dim]
  std::unique_ptr<float[]> largest;
  std::unique_ptr<float[]> total;
};

}  // namespace quire
