// The work of attention on a GPU, planned on the host: that of whole steps, and what captured decodes share. The slow
// twins are `plan_work` in `ops/triton/attention/work_items.py` and `ops/triton/attention/decode_sharing.py`.
#include "shared_prefixes.h"

namespace {

// How a step is cut.
struct StepCut {
  int64_t group;        // query heads of a KV head
  int64_t decode_rows;  // of a tile of sequences with few rows
  int64_t many_rows;    // rows of other sequences in a tile
  int64_t window;       // 0 for none, as the next
  int64_t chunk;
  int64_t busy_sequences;  // from so many sequences with few rows on, `even` holds for these
  SplitRule splits;
  SplitRule even;

  int64_t first_seen(int64_t position) const {
    if (chunk) return position / chunk * chunk;
    return window ? std::max<int64_t>(0, position + 1 - window) : 0;
  }
};

// How much there is of each kind of work.
struct StepCounts {
  int64_t num_few;
  int64_t num_parts;
  int64_t num_many;
  int64_t num_split;
  int64_t num_places;
  int64_t num_shared_items;
  int64_t num_shared_rows;
};

struct Item {
  int64_t first_row, num_rows, position, table, first, end, place;
};

void append(std::vector<int32_t>& numbers, const Item& item) {
  for (const int64_t number :
       {item.first_row, item.num_rows, item.position, item.table, item.first, item.end, item.place, int64_t(0)})
    numbers.push_back(int32_t(number));
}

}  // namespace

// Plans a step, without its slots. Writes few, parts, many, split rows, shared items and their rows one behind the
// other, and the number of shared items with three zeros behind these, unless they are more than `capacity` numbers.
// Returns how many they are. Without `rule`, nothing is shared.
QUIRE_EXPORT int64_t quire_plan_step(const StepRows* rows, const StepCut* cut, const SharingRule* rule,
                                     int32_t* numbers, int64_t capacity, StepCounts* counts) {
  std::vector<Item> few, many;
  for (int64_t seq = 0; seq < rows->num_seqs; ++seq) {
    const int64_t start = rows->row_starts[seq], num_rows = rows->row_starts[seq + 1] - start;
    const int64_t end = rows->context_lens[seq], position = end - num_rows;
    const Item span{start, num_rows, position, rows->block_starts[seq], cut->first_seen(position), end, -1};
    (num_rows * cut->group <= cut->decode_rows ? few : many).push_back(span);
  }

  std::vector<PrefixCandidate> candidates;
  std::vector<int64_t> candidate_of(few.size(), -1);
  if (rule && few.size() > 1) {
    for (size_t idx = 0; idx < few.size(); ++idx) {
      const Item& span = few[idx];
      if (cut->first_seen(span.end - 1)) continue;
      candidate_of[idx] = int64_t(candidates.size());
      candidates.push_back({span.first_row, span.num_rows, span.table, span.position});
    }
  }
  std::vector<SharedRange> ranges;
  if (!candidates.empty()) ranges = PrefixSearch(candidates, rows->block_ids, *rule).ranges();
  SharedItems shared(candidates, ranges, rule ? *rule : SharingRule{});

  int64_t num_tokens = 0;
  for (size_t idx = 0; idx < few.size(); ++idx) {
    const int64_t candidate = candidate_of[idx];
    if (candidate >= 0 && shared.num_parts[candidate]) few[idx].first = shared.ends[candidate];
    num_tokens += few[idx].end - few[idx].first;
  }
  const SplitRule& splits = int64_t(few.size()) >= cut->busy_sequences ? cut->even : cut->splits;
  const int64_t length = splits.length(num_tokens);

  std::vector<int32_t> whole, parts, tiles, split_rows;
  std::vector<int64_t> places(candidates.size());
  int64_t num_places = 0;
  for (size_t idx = 0; idx < few.size(); ++idx) {
    const Item& span = few[idx];
    const int64_t start = span.first / splits.tile_tokens * splits.tile_tokens, candidate = candidate_of[idx];
    const int64_t num_shared = candidate < 0 ? 0 : shared.num_parts[candidate];
    if (span.end - start <= length && !num_shared) {
      append(whole, span);
      continue;
    }
    const int64_t num_own = std::max<int64_t>(0, ceil_div(span.end - start, length));
    for (int64_t part = 0; part < num_own; ++part) {
      Item item = span;
      item.first = std::max(start + part * length, span.first);
      item.end = std::min(start + (part + 1) * length, span.end);
      item.place = num_places + (num_shared + part) * span.num_rows;
      append(parts, item);
    }
    if (candidate >= 0) places[candidate] = num_places;
    const int64_t num_parts = num_shared + num_own;
    split_rows.insert(split_rows.end(),
                      {int32_t(span.first_row), int32_t(span.num_rows), int32_t(num_places), int32_t(num_parts)});
    num_places += num_parts * span.num_rows;
  }

  std::vector<Item> tiled;
  for (const Item& span : many) {
    for (int64_t skipped = 0; skipped < span.num_rows; skipped += cut->many_rows) {
      const int64_t position = span.position + skipped, num_rows = std::min(cut->many_rows, span.num_rows - skipped);
      tiled.push_back({span.first_row + skipped, num_rows, position, span.table, cut->first_seen(position),
                       position + num_rows, -1});
    }
  }
  // Those with the most tokens first.
  std::stable_sort(tiled.begin(), tiled.end(), [](const Item& one, const Item& other) {
    return one.end - one.first > other.end - other.first;
  });
  for (const Item& item : tiled) append(tiles, item);

  for (size_t idx = 0; idx < shared.item_candidates.size(); ++idx)
    shared.items[idx * kSharedItem + kSharedTable] = int32_t(candidates[shared.item_candidates[idx]].table);
  for (size_t idx = 0; idx < shared.row_candidates.size(); ++idx)
    shared.rows[idx * kSharedRow + kSharedPlace] += int32_t(places[shared.row_candidates[idx]]);

  const std::vector<int32_t> last{int32_t(shared.item_candidates.size()), 0, 0, 0};
  const std::vector<int32_t>* const sections[] = {&whole, &parts, &tiles, &split_rows, &shared.items, &shared.rows,
                                                  &last};
  int64_t num_numbers = 0;
  for (const std::vector<int32_t>* section : sections) num_numbers += int64_t(section->size());
  if (num_numbers <= capacity)
    for (const std::vector<int32_t>* section : sections) numbers = std::copy(section->begin(), section->end(), numbers);
  *counts = {int64_t(whole.size()) / kItem,
             int64_t(parts.size()) / kItem,
             int64_t(tiles.size()) / kItem,
             int64_t(split_rows.size()) / kSplitRow,
             num_places,
             int64_t(shared.item_candidates.size()),
             int64_t(shared.row_candidates.size())};
  return num_numbers;
}

// Decodes of a step on the host, of one row each; see `SharedDecodes.find`.
struct SharedDecodeRows {
  int64_t num_rows;
  const int64_t* positions;     // [num_rows]
  const bool* sees_all;         // [num_rows], the row sees its first token
  const int64_t* block_starts;  // [num_rows]
  const int64_t* block_ids;
};

// What they share, as `DecodeSharing`, and what it was found from, as `Seen`.
struct FoundSharing {
  int64_t max_items;
  int64_t max_members;
  int64_t* candidates;  // [num_rows], rows that see their first token and begin with the same block as another one
  int64_t* deciding;    // [num_rows], units that decide on each of these
  int64_t* rows;        // [num_rows], rows that share tokens
  int64_t* ends;
  int64_t* num_parts;
  int32_t* items;        // [max_items, 8]
  int64_t* item_rows;    // [max_items]
  int32_t* members;      // [max_members, 4]
  int64_t* member_rows;  // [max_members]
  int64_t num_candidates;
  int64_t num_sharing;
  int64_t num_items;
  int64_t num_members;
};

// Finds what decodes share. Returns false where that is more than there is room for.
QUIRE_EXPORT bool quire_share_decodes(const SharedDecodeRows* rows, const SharingRule* rule, FoundSharing* found) {
  // Where no two sequences begin with the same block, nothing else is looked at.
  std::unordered_map<int64_t, int64_t> num_heads;
  for (int64_t row = 0; row < rows->num_rows; ++row) ++num_heads[rows->block_ids[rows->block_starts[row]]];
  std::vector<PrefixCandidate> candidates;
  for (int64_t row = 0; row < rows->num_rows; ++row) {
    const int64_t table = rows->block_starts[row];
    if (!rows->sees_all[row] || num_heads[rows->block_ids[table]] < 2) continue;
    candidates.push_back({row, 1, table, rows->positions[row]});
  }
  const PrefixSearch search(candidates, rows->block_ids, *rule);
  const SharedItems shared(candidates, search.ranges(), *rule);
  found->num_candidates = int64_t(candidates.size());
  found->num_sharing = int64_t(shared.sharing.size());
  found->num_items = int64_t(shared.item_candidates.size());
  found->num_members = int64_t(shared.row_candidates.size());
  if (found->num_items > found->max_items || found->num_members > found->max_members) return false;
  for (size_t idx = 0; idx < candidates.size(); ++idx) {
    found->candidates[idx] = candidates[idx].first_row;
    found->deciding[idx] = search.deciding()[idx] / rule->unit;
  }
  for (size_t idx = 0; idx < shared.sharing.size(); ++idx) {
    const int64_t candidate = shared.sharing[idx];
    found->rows[idx] = candidates[candidate].first_row;
    found->ends[idx] = shared.ends[candidate];
    found->num_parts[idx] = shared.num_parts[candidate];
  }
  std::copy(shared.items.begin(), shared.items.end(), found->items);
  std::copy(shared.rows.begin(), shared.rows.end(), found->members);
  const auto row_of = [&](int64_t candidate) { return candidates[candidate].first_row; };
  std::transform(shared.item_candidates.begin(), shared.item_candidates.end(), found->item_rows, row_of);
  std::transform(shared.row_candidates.begin(), shared.row_candidates.end(), found->member_rows, row_of);
  return true;
}
