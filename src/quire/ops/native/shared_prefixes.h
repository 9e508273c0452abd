// Sequences of a step on a GPU that begin with the same blocks, and how these are cut; on the host. The slow twins
// are `ops/triton/attention/shared_prefixes.py` and `shared_work.py`, which say what the numbers mean; the order is
// theirs too.
#pragma once

#include <cstring>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "work_items.h"

namespace {

// When shared tokens are read once; see `SharingRule` in shared_prefixes.py.
struct SharingRule {
  int64_t tile_rows;
  int64_t unit;
  int64_t block_size;
  int64_t token_bytes;
  int64_t row_bytes;  // of the partial results that a row of a range adds
  int64_t least_tokens;
  int64_t max_ranges;
  double least_bytes;
  SplitRule splits;

  int64_t saved_bytes(int64_t num_rows, int64_t num_sequences, int64_t num_tokens) const {
    return (num_sequences - ceil_div(num_rows, tile_rows)) * num_tokens * token_bytes - num_rows * row_bytes;
  }
};

// A sequence that may share what it begins with.
struct PrefixCandidate {
  int64_t first_row;
  int64_t num_rows;
  int64_t table;       // index of its first block
  int64_t num_tokens;  // tokens that all its rows see and none of them is
};

// Tokens [first, end) of some candidates, in the order of their rows.
struct SharedRange {
  std::vector<int64_t> members;
  int64_t first;
  int64_t end;
};

// Finds the ranges that are read once, and what decides on them.
class PrefixSearch {
 public:
  PrefixSearch(const std::vector<PrefixCandidate>& candidates, const int64_t* block_ids, const SharingRule& rule)
      : candidates_(candidates), block_ids_(block_ids), rule_(rule), deciding_(candidates.size(), rule.least_tokens) {
    if (rule.tile_rows < 2) return;  // no two rows are read together
    int64_t saved = 0;
    for (std::vector<int64_t>& alike : alike_beginnings())
      if (alike.size() > 1) saved += divide(alike);
    if (double(saved) <= rule.least_bytes) ranges_.clear();
  }

  const std::vector<SharedRange>& ranges() const { return ranges_; }
  // Number of tokens of each candidate whose blocks decide on the ranges.
  const std::vector<int64_t>& deciding() const { return deciding_; }

 private:
  // Candidates that are alike up to the least number of tokens.
  struct Part {
    size_t start, stop;
    int64_t num_equal, begin, depth;
  };

  int64_t num_units(int64_t idx) const { return candidates_[idx].num_tokens / rule_.unit; }
  size_t unit_bytes() const { return size_t(rule_.unit / rule_.block_size) * sizeof(int64_t); }
  const char* unit(int64_t idx, int64_t number) const {
    return reinterpret_cast<const char*>(block_ids_ + candidates_[idx].table) + number * unit_bytes();
  }

  std::vector<std::vector<int64_t>> alike_beginnings() const {
    std::vector<std::vector<int64_t>> groups;
    std::unordered_map<std::string_view, size_t> places;
    const int64_t least = rule_.least_tokens / rule_.unit;
    for (size_t idx = 0; idx < candidates_.size(); ++idx) {
      if (num_units(idx) < least || candidates_[idx].num_rows > rule_.tile_rows) continue;
      const std::string_view beginning(unit(idx, 0), least * unit_bytes());
      const auto [found, is_new] = places.emplace(beginning, groups.size());
      if (is_new) groups.emplace_back();
      groups[found->second].push_back(idx);
    }
    return groups;
  }

  // Number of units that two candidates have in common, of which the first `low` are known to be.
  int64_t num_equal(int64_t one, int64_t other, int64_t low) const {
    const int64_t high = std::min(num_units(one), num_units(other));
    while (low < high && !std::memcmp(unit(one, low), unit(other, low), unit_bytes())) ++low;
    return low;
  }

  bool same_unit(int64_t one, int64_t other, int64_t number) const {
    const bool has_one = number < num_units(one), has_other = number < num_units(other);
    if (!has_one || !has_other) return has_one == has_other;
    return !std::memcmp(unit(one, number), unit(other, number), unit_bytes());
  }

  // Divides candidates that begin alike; returns the bytes that their ranges save.
  //
  // They go together as far as all have the same blocks, and are divided by their next unit. In the order of their
  // tables those that go together are neighbours, and the first and the last tell how far.
  int64_t divide(std::vector<int64_t>& order) {
    int64_t common = num_units(order[0]);
    for (const int64_t idx : order) {
      int64_t equal = std::min(common, num_units(idx));
      if (std::memcmp(unit(order[0], 0), unit(idx, 0), equal * unit_bytes())) equal = num_equal(order[0], idx, 0);
      common = std::min(common, equal);
    }
    std::stable_sort(order.begin(), order.end(), [&](int64_t one, int64_t other) {
      const int64_t units = std::min(num_units(one), num_units(other)) - common;
      const int sign = std::memcmp(unit(one, common), unit(other, common), units * unit_bytes());
      return sign ? sign < 0 : num_units(one) < num_units(other);
    });
    std::vector<int64_t> rows_before{0};
    for (const int64_t idx : order) rows_before.push_back(rows_before.back() + candidates_[idx].num_rows);

    int64_t all_saved = 0;
    std::vector<Part> open{{0, order.size(), common, 0, 0}};
    while (!open.empty()) {
      Part part = open.back();
      open.pop_back();
      part.num_equal = num_equal(order[part.start], order[part.stop - 1], part.num_equal);
      const int64_t end = part.num_equal * rule_.unit, num_rows = rows_before[part.stop] - rows_before[part.start];
      const int64_t saved = rule_.saved_bytes(num_rows, part.stop - part.start, end - part.begin);
      if (end - part.begin >= rule_.least_tokens && saved > 0) {
        SharedRange range{{order.begin() + part.start, order.begin() + part.stop}, part.begin, end};
        std::sort(range.members.begin(), range.members.end());
        ranges_.push_back(std::move(range));
        all_saved += saved;
        part.begin = end;
        ++part.depth;
      }
      for (size_t first = part.start, last; first < part.stop; first = last) {
        for (last = first + 1; last < part.stop && same_unit(order[first], order[last], part.num_equal);) ++last;
        if (part.num_equal < num_units(order[first]) && last - first > 1 && part.depth < rule_.max_ranges) {
          open.push_back({first, last, part.num_equal + 1, part.begin, part.depth});
        } else {  // they end here, or nothing more is shared
          for (size_t idx = first; idx < last; ++idx) deciding_[order[idx]] = end + rule_.unit;
        }
      }
    }
    return all_saved;
  }

  const std::vector<PrefixCandidate>& candidates_;
  const int64_t* block_ids_;
  const SharingRule& rule_;
  std::vector<SharedRange> ranges_;
  std::vector<int64_t> deciding_;
};

// Ranges cut into splits, with their sequences in tiles, as items for programs. Places of partial results count from
// the first one of the sequence.
struct SharedItems {
  std::vector<int32_t> items;  // kSharedItem numbers each
  std::vector<int64_t> item_candidates;
  std::vector<int32_t> rows;  // kSharedRow numbers each
  std::vector<int64_t> row_candidates;
  std::vector<int64_t> sharing;    // candidates that share tokens, in the order in which they were found
  std::vector<int64_t> ends;       // of each candidate: end of the tokens that it shares, 0 for none
  std::vector<int64_t> num_parts;  // of each candidate: number of parts in which these are

  SharedItems(const std::vector<PrefixCandidate>& candidates, const std::vector<SharedRange>& ranges,
              const SharingRule& rule)
      : ends(candidates.size()), num_parts(candidates.size()) {
    if (ranges.empty()) return;
    // Index behind the last member of each tile, by ranges.
    std::vector<std::vector<size_t>> tiles;
    int64_t num_tokens = 0;
    for (const SharedRange& range : ranges) {
      std::vector<size_t> stops;
      int64_t num_rows = 0;
      for (size_t idx = 0; idx < range.members.size(); ++idx) {
        const int64_t more = candidates[range.members[idx]].num_rows;
        if (num_rows + more > rule.tile_rows) {
          stops.push_back(idx);
          num_rows = 0;
        }
        num_rows += more;
      }
      stops.push_back(range.members.size());
      num_tokens += int64_t(stops.size()) * (range.end - range.first);
      tiles.push_back(std::move(stops));
    }
    const int64_t length = rule.splits.length(num_tokens);
    for (size_t idx = 0; idx < ranges.size(); ++idx) add(candidates, ranges[idx], tiles[idx], length);
  }

 private:
  void add(const std::vector<PrefixCandidate>& candidates, const SharedRange& range, const std::vector<size_t>& stops,
           int64_t length) {
    std::vector<int32_t> tile_starts;
    size_t member = 0;
    for (const size_t stop : stops) {
      tile_starts.push_back(int32_t(row_candidates.size()));
      for (; member < stop; ++member) {
        const int64_t idx = range.members[member], num_rows = candidates[idx].num_rows;
        for (int64_t row = 0; row < num_rows; ++row) {
          const int64_t place = num_parts[idx] * num_rows + row;
          rows.insert(rows.end(), {int32_t(candidates[idx].first_row + row), int32_t(place), int32_t(num_rows), 0});
          row_candidates.push_back(idx);
        }
      }
    }
    tile_starts.push_back(int32_t(row_candidates.size()));
    int32_t part = 0;
    for (int64_t start = range.first; start < range.end; start += length, ++part) {
      const int32_t end = int32_t(std::min(start + length, range.end));
      for (size_t tile = 0; tile < stops.size(); ++tile) {
        const int32_t num_rows = tile_starts[tile + 1] - tile_starts[tile];
        items.insert(items.end(), {tile_starts[tile], num_rows, 0, int32_t(start), end, part, 0, 0});
        item_candidates.push_back(range.members[tile ? stops[tile - 1] : 0]);
      }
    }
    for (const int64_t idx : range.members) {
      if (!num_parts[idx]) sharing.push_back(idx);
      ends[idx] = range.end;
      num_parts[idx] += part;
    }
  }
};

}  // namespace
