// Cuts a step's attention into jobs, and finds the blocks that sequences share.
#include "attention_plan.h"

#include <algorithm>

#include "cache.h"
#include "parallel.h"

namespace {

using quire::AttentionPlan;
using quire::kPartTokens;
using quire::kRows;
using quire::Piece;
using quire::Strip;

// Blocks are compared for so many tokens at a time.
constexpr int64_t kSharedTokens = 128;
// A strip of more rows is worth a job of its own: to join what it collects would cost more than to read once more.
constexpr int64_t kSharingRows = kRows / 4;
// Each job waits for its first tokens, and what it collects is joined: so parts are as long as leaves each thread so many
// jobs, and no longer than that.
constexpr int64_t kLongestPart = 4 * kPartTokens;
constexpr int64_t kThreadJobs = 16;

// A strip's context, while it is cut.
struct Context {
  int64_t strip;
  int64_t begin;  // what its rows see: [begin, end)
  int64_t end;
  int64_t whole_begin;  // what all of its rows see: [whole_begin, whole_end)
  int64_t whole_end;
  int64_t shared_begin = 0;  // what it shares: [shared_begin, shared_end), in `num_shared` pieces
  int64_t shared_end = 0;
  int64_t num_shared = 0;
  int64_t group = -1;  // the last it was in
  bool is_alone = false;
};

// Contexts with the same blocks in [begin, end).
struct Group {
  int64_t begin;
  int64_t end;
  std::vector<Piece> pieces;
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
  // Where results must not depend on other sequences, neither may the cuts.
  static int64_t part_tokens(const StepRows& rows, const Cache& cache, const AttentionPlan& plan) {
    if (plan.is_deterministic) return kPartTokens;
    int64_t num_tokens = 0;
    for (int64_t seq = 0; seq < rows.num_seqs; ++seq) num_tokens += rows.context_lens[seq];
    const int64_t length = num_tokens * cache.num_kv_heads / (kThreadJobs * quire::max_threads());
    return std::clamp(length / kPartTokens * kPartTokens, kPartTokens, kLongestPart);
  }

  // A sequence's strips; those of a long chunk are jobs as they are, the only one of few rows is cut.
  void add_strips(int64_t seq) {
    const int64_t num_tokens = rows_.row_starts[seq + 1] - rows_.row_starts[seq];
    const int64_t num_rows = num_tokens * plan_.group, before = rows_.context_lens[seq] - num_tokens;
    const size_t first_job = plan_.jobs.size();
    for (int64_t first = 0; first < num_rows; first += kRows) {
      const int64_t count = std::min<int64_t>(kRows, num_rows - first);
      const int64_t first_position = before + first / plan_.group;
      const int64_t last_position = before + (first + count - 1) / plan_.group;
      const int64_t strip = int64_t(plan_.strips.size());
      const int64_t begin = plan_.sight.first_seen(first_position);
      plan_.strips.push_back({seq, first, count, 0, 0});
      if (num_rows > kRows) {
        add_job(begin, last_position + 1, strip, 0);
      } else {
        contexts_.push_back({strip, begin, last_position + 1, plan_.sight.first_seen(last_position), first_position + 1});
      }
    }
    bring_together(first_job);
  }

  void add_job(int64_t begin, int64_t end, int64_t strip, int64_t idx) {
    plan_.jobs.push_back({begin, end, int64_t(plan_.pieces.size()), 1, int64_t(plan_.jobs.size()), 1});
    plan_.pieces.push_back({strip, idx});
  }

  // Says that all jobs from the first given one on are over much the same tokens.
  void bring_together(size_t first) {
    for (size_t idx = first; idx < plan_.jobs.size(); ++idx) {
      plan_.jobs[idx].first_beside = int64_t(first);
      plan_.jobs[idx].num_beside = int64_t(plan_.jobs.size() - first);
    }
  }

  // Finds what contexts share, from front to back. One that has parted from all others stays alone.
  void share() {
    const int64_t length = plan_.is_deterministic ? kPartTokens : kSharedTokens;
    std::vector<Context*> open, here;
    for (Context& context : contexts_)
      if (plan_.strips[context.strip].num_rows <= kSharingRows) open.push_back(&context);
    for (int64_t begin = 0; open.size() > 1; begin += length) {
      const int64_t end = begin + length;
      open.erase(std::remove_if(open.begin(), open.end(),
                                [&](Context* context) { return context->is_alone || context->whole_end < end; }),
                 open.end());
      here.clear();
      std::copy_if(open.begin(), open.end(), std::back_inserter(here),
                   [&](Context* context) { return context->whole_begin <= begin; });
      // The order that equal ones have is that of their strips, so a step is always planned alike.
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

  // Compares the blocks of the tokens [begin, end): less than 0, 0 or more than 0.
  int compare(const Context& a, const Context& b, int64_t begin, int64_t end) const {
    const int64_t* of_a = table_of(a);
    const int64_t* of_b = table_of(b);
    for (int64_t block = begin / block_size_; block * block_size_ < end; ++block)
      if (of_a[block] != of_b[block]) return of_a[block] < of_b[block] ? -1 : 1;
    return 0;
  }

  const int64_t* table_of(const Context& context) const {
    return rows_.block_ids + rows_.block_starts[plan_.strips[context.strip].seq];
  }

  // Has contexts share [begin, end): as more of what they have shared together so far, or as a group of their own.
  void add_to_group(Context** contexts, size_t count, int64_t begin, int64_t end) {
    const int64_t before = contexts[0]->group;
    bool goes_on = before >= 0 && begin % part_tokens_ != 0 && groups_[before].pieces.size() == count;
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
      const int64_t num_before = context.begin < context.shared_begin;  // less than a part, so one piece
      groups_.back().pieces.push_back({context.strip, num_before + context.num_shared++});
    }
  }

  // As many jobs as the rows of a group take.
  void add_jobs(const Group& group) {
    const size_t first_job = plan_.jobs.size();
    int64_t num_rows = kRows;
    for (const Piece& piece : group.pieces) {
      const int64_t count = plan_.strips[piece.strip].num_rows;
      if (num_rows + count > kRows) {
        plan_.jobs.push_back({group.begin, group.end, int64_t(plan_.pieces.size()), 0, 0, 0});
        num_rows = 0;
      }
      plan_.pieces.push_back(piece);
      ++plan_.jobs.back().num_pieces;
      num_rows += count;
    }
    bring_together(first_job);
  }

  // Cuts what a context does not share.
  void cut(const Context& context) {
    Strip& strip = plan_.strips[context.strip];
    const bool is_shared = context.num_shared > 0;
    if (!is_shared && context.begin / part_tokens_ == (context.end - 1) / part_tokens_)
      return add_job(context.begin, context.end, context.strip, 0);
    if (is_shared && context.begin < context.shared_begin) {
      add_job(context.begin, context.shared_begin, context.strip, strip.num_pieces++);
    }
    strip.num_pieces += context.num_shared;
    for (int64_t begin = is_shared ? context.shared_end : context.begin, end; begin < context.end; begin = end) {
      end = std::min(context.end, (begin / part_tokens_ + 1) * part_tokens_);
      add_job(begin, end, context.strip, strip.num_pieces++);
    }
    strip.first_slot = plan_.num_slots;
    plan_.num_slots += strip.num_pieces * strip.num_rows;
  }

  const StepRows& rows_;
  const int64_t block_size_;
  AttentionPlan& plan_;
  const int64_t part_tokens_;
  std::vector<Context> contexts_;
  std::vector<Group> groups_;
};

}  // namespace

// Plans a step for layers of `group` query heads a KV head. The plan is freed by `quire_free_attention_plan`.
QUIRE_EXPORT AttentionPlan* quire_plan_attention(const StepRows* rows, const Cache* cache, int64_t group,
                                                 int64_t window, int64_t chunk, int64_t is_deterministic) {
  auto plan = std::make_unique<AttentionPlan>();
  plan->group = group;
  plan->sight = {window, chunk};
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

// The tokens whose keys and values each KV head reads in a layer, as often as it reads them.
QUIRE_EXPORT int64_t quire_tokens_read(const AttentionPlan* plan) {
  int64_t count = 0;
  for (const quire::Job& job : plan->jobs) count += job.end - job.begin;
  return count;
}
