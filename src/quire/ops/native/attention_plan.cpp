// Divides a step's attention into jobs, and finds the blocks that sequences share.
#include "attention_plan.h"

#include <algorithm>

#include "cache.h"
#include "parallel.h"

namespace {

using quire::AttentionPlan;
using quire::kPartTokens;
using quire::kRows;
using quire::KVSplit;
using quire::QueryTile;

// Number of tokens whose blocks are compared at a time.
constexpr int64_t kSharedTokens = 128;
// A query tile with more rows reads shared blocks in a job of its own: merging its partial results would cost more than
// reading the blocks once more.
constexpr int64_t kSharingRows = kRows / 4;
// Each job waits for its first tokens, and its partial results must be merged. Parts are therefore as long as they can
// be with `kThreadJobs` jobs for each thread, up to this length.
constexpr int64_t kLongestPart = 4 * kPartTokens;
constexpr int64_t kThreadJobs = 16;

// The context of a query tile while it is being cut.
struct Context {
  int64_t query_tile;
  int64_t begin;  // tokens that at least one of its rows sees: [begin, end)
  int64_t end;
  int64_t whole_begin;  // tokens that all of its rows see: [whole_begin, whole_end)
  int64_t whole_end;
  int64_t shared_begin = 0;  // tokens that are shared: [shared_begin, shared_end), in `num_shared` splits
  int64_t shared_end = 0;
  int64_t num_shared = 0;
  int64_t group = -1;  // index of the group that it joined last
  bool is_alone = false;
};

// Contexts with the same blocks in [begin, end).
struct Group {
  int64_t begin;
  int64_t end;
  std::vector<KVSplit> splits;
};

class Planner {
 public:
  Planner(const StepRows& rows, const Cache& cache, AttentionPlan& plan)
      : rows_(rows), block_size_(cache.block_size), plan_(plan), part_tokens_(part_tokens(rows, cache, plan)) {}

  void make() {
    for (int64_t seq = 0; seq < rows_.num_seqs; ++seq) add_strips(seq);
    share();
    for (const Group& group : groups_) add_jobs(group);
    for (const Context& context : contexts_) cut(context);
  }

 private:
  // Under a deterministic plan the cuts must not depend on other sequences either.
  static int64_t part_tokens(const StepRows& rows, const Cache& cache, const AttentionPlan& plan) {
    if (plan.is_deterministic) return kPartTokens;
    int64_t num_tokens = 0;
    for (int64_t seq = 0; seq < rows.num_seqs; ++seq) num_tokens += rows.context_lens[seq];
    const int64_t length = num_tokens * cache.num_kv_heads / (kThreadJobs * quire::max_threads());
    return std::clamp(length / kPartTokens * kPartTokens, kPartTokens, kLongestPart);
  }

  // Adds a sequence's query tiles. Each tile of a long chunk becomes one job; the single tile of a short one becomes a
  // context, which is cut later.
  void add_strips(int64_t seq) {
    const int64_t num_tokens = rows_.row_starts[seq + 1] - rows_.row_starts[seq];
    const int64_t num_rows = num_tokens * plan_.group, before = rows_.context_lens[seq] - num_tokens;
    const size_t first_job = plan_.jobs.size();
    for (int64_t first = 0; first < num_rows; first += kRows) {
      const int64_t count = std::min<int64_t>(kRows, num_rows - first);
      const int64_t first_position = before + first / plan_.group;
      const int64_t last_position = before + (first + count - 1) / plan_.group;
      const int64_t query_tile = int64_t(plan_.query_tiles.size());
      const int64_t begin = plan_.mask.first_seen(first_position);
      plan_.query_tiles.push_back({seq, first, count, 0, 0});
      if (num_rows > kRows) {
        add_job(begin, last_position + 1, query_tile, 0);
      } else {
        contexts_.push_back(
            {query_tile, begin, last_position + 1, plan_.mask.first_seen(last_position), first_position + 1});
      }
    }
    bring_together(first_job);
  }

  void add_job(int64_t begin, int64_t end, int64_t query_tile, int64_t idx) {
    plan_.jobs.push_back({begin, end, int64_t(plan_.splits.size()), 1, int64_t(plan_.jobs.size()), 1});
    plan_.splits.push_back({query_tile, idx});
  }

  // Marks all jobs from `first` on as jobs over mostly the same tokens.
  void bring_together(size_t first) {
    for (size_t idx = first; idx < plan_.jobs.size(); ++idx) {
      plan_.jobs[idx].first_beside = int64_t(first);
      plan_.jobs[idx].num_beside = int64_t(plan_.jobs.size() - first);
    }
  }

  // Finds the tokens that contexts share, from front to back. A context that differs from all others shares nothing
  // from there on.
  void share() {
    const int64_t length = plan_.is_deterministic ? kPartTokens : kSharedTokens;
    std::vector<Context*> open, here;
    for (Context& context : contexts_)
      if (plan_.query_tiles[context.query_tile].num_rows <= kSharingRows) open.push_back(&context);
    for (int64_t begin = 0; open.size() > 1; begin += length) {
      const int64_t end = begin + length;
      open.erase(std::remove_if(open.begin(), open.end(),
                                [&](Context* context) { return context->is_alone || context->whole_end < end; }),
                 open.end());
      here.clear();
      std::copy_if(open.begin(), open.end(), std::back_inserter(here),
                   [&](Context* context) { return context->whole_begin <= begin; });
      // A stable sort keeps equal contexts in the order of their query tiles, so equal steps get equal plans.
      std::stable_sort(here.begin(), here.end(),
                       [&](Context* a, Context* b) { return compare(*a, *b, begin, end) < 0; });
      for (size_t first = 0, last; first < here.size(); first = last) {
        for (last = first + 1; last < here.size() && compare(*here[first], *here[last], begin, end) == 0;) ++last;
        if (last - first == 1)
          here[first]->is_alone = true;
        else
          add_to_group(&here[first], last - first, begin, end);
      }
    }
  }

  // Compares the block IDs of the tokens [begin, end); returns less than 0, 0 or more than 0.
  int compare(const Context& a, const Context& b, int64_t begin, int64_t end) const {
    const int64_t* of_a = table_of(a);
    const int64_t* of_b = table_of(b);
    for (int64_t block = begin / block_size_; block * block_size_ < end; ++block)
      if (of_a[block] != of_b[block]) return of_a[block] < of_b[block] ? -1 : 1;
    return 0;
  }

  const int64_t* table_of(const Context& context) const {
    return rows_.block_ids + rows_.block_starts[plan_.query_tiles[context.query_tile].seq];
  }

  // Records that contexts share [begin, end): extends the group that they form already, or adds a new group.
  void add_to_group(Context** contexts, size_t count, int64_t begin, int64_t end) {
    const int64_t before = contexts[0]->group;
    bool goes_on = before >= 0 && begin % part_tokens_ != 0 && groups_[before].splits.size() == count;
    for (size_t idx = 0; idx < count; ++idx) goes_on = goes_on && contexts[idx]->group == before;
    if (goes_on) {
      groups_[before].end = end;
    } else {
      groups_.push_back({begin, end, {}});
    }
    for (size_t idx = 0; idx < count; ++idx) {
      Context& context = *contexts[idx];
      context.shared_end = end;
      if (goes_on) continue;
      if (context.num_shared == 0) context.shared_begin = begin;
      context.group = int64_t(groups_.size()) - 1;
      const int64_t num_before = context.begin < context.shared_begin;  // less than one part, so one split
      groups_.back().splits.push_back({context.query_tile, num_before + context.num_shared++});
    }
  }

  // Adds the jobs of a group, each of at most `kRows` rows.
  void add_jobs(const Group& group) {
    const size_t first_job = plan_.jobs.size();
    int64_t num_rows = kRows;
    for (const KVSplit& split : group.splits) {
      const int64_t count = plan_.query_tiles[split.query_tile].num_rows;
      if (num_rows + count > kRows) {
        plan_.jobs.push_back({group.begin, group.end, int64_t(plan_.splits.size()), 0, 0, 0});
        num_rows = 0;
      }
      plan_.splits.push_back(split);
      ++plan_.jobs.back().num_splits;
      num_rows += count;
    }
    bring_together(first_job);
  }

  // Adds jobs for the tokens of a context that are not shared.
  void cut(const Context& context) {
    QueryTile& query_tile = plan_.query_tiles[context.query_tile];
    const bool is_shared = context.num_shared > 0;
    if (!is_shared && context.begin / part_tokens_ == (context.end - 1) / part_tokens_)
      return add_job(context.begin, context.end, context.query_tile, 0);
    if (is_shared && context.begin < context.shared_begin) {
      add_job(context.begin, context.shared_begin, context.query_tile, query_tile.num_splits++);
    }
    query_tile.num_splits += context.num_shared;
    for (int64_t begin = is_shared ? context.shared_end : context.begin, end; begin < context.end; begin = end) {
      end = std::min(context.end, (begin / part_tokens_ + 1) * part_tokens_);
      add_job(begin, end, context.query_tile, query_tile.num_splits++);
    }
    query_tile.first_slot = plan_.num_slots;
    plan_.num_slots += query_tile.num_splits * query_tile.num_rows;
  }

  const StepRows& rows_;
  const int64_t block_size_;
  AttentionPlan& plan_;
  const int64_t part_tokens_;
  std::vector<Context> contexts_;
  std::vector<Group> groups_;
};

}  // namespace

// Returns the plan of a step for layers with `group` query heads per KV head; `quire_free_attention_plan` frees it.
QUIRE_EXPORT AttentionPlan* quire_plan_attention(const StepRows* rows, const Cache* cache, int64_t group,
                                                 int64_t window, int64_t chunk, int64_t is_deterministic) {
  auto plan = std::make_unique<AttentionPlan>();
  plan->group = group;
  plan->mask = {window, chunk};
  plan->is_deterministic = is_deterministic != 0;
  Planner(*rows, *cache, *plan).make();
  const int64_t num_kept = cache->num_kv_heads * plan->num_slots;
  if (num_kept > 0) {
    plan->sums.reset(new float[num_kept * cache->head_dim]);
    plan->largest.reset(new float[num_kept]);
    plan->total.reset(new float[num_kept]);
  }
  return plan.release();
}

QUIRE_EXPORT void quire_free_attention_plan(AttentionPlan* plan) { delete plan; }

// Returns the number of tokens whose keys and values each KV head reads in a layer, repeated reads included.
QUIRE_EXPORT int64_t quire_tokens_read(const AttentionPlan* plan) {
  int64_t count = 0;
  for (const quire::Job& job : plan->jobs) count += job.end - job.begin;
  return count;
}
