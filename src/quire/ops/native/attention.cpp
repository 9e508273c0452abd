// Attention read straight from block tables, for any mixture of single rows (decode), few rows (verified drafts) and
// chunks of prompts.
//
// The query rows of one KV head (all heads of its group, for some tokens of one sequence) meet a tile of keys and
// values at a time: both are packed into panels that stay in the CPU's cache, and two small products with a running
// softmax between them do the rest (FlashAttention, arXiv 2205.14135; block tables: PagedAttention, arXiv 2309.06180).
// The context of few rows is cut into parts of a fixed length, so that a single sequence keeps many threads busy. The
// cuts depend on the sequence alone, and so does what it gets, whatever else is in the batch.
#include <memory>
#include <vector>

#include "cache.h"
#include "parallel.h"
#include "tiles.h"

namespace {

constexpr int kRows = 64;         // query rows of a job, at most
constexpr int kTokens = 128;      // tokens of a tile
constexpr int kPartTokens = 512;  // tokens of a part, where the context is cut

// One thread's tiles: 450 KiB at most, a third of it touched for heads of 128 in bfloat16.
template <typename Steps>
struct Scratch {
  using Value = typename Steps::Value;
  alignas(64) Value queries[kRows * kMaxDim];
  alignas(64) Value keys[kTokens * kMaxDim];
  alignas(64) Value values[kTokens * kMaxDim];
  alignas(64) float scores[kRows * kTokens];
  alignas(64) Value weights[kRows * kTokens];
  alignas(64) float sums[kRows * kMaxDim];
  float largest[kRows];
  float total[kRows];
  float rescale[kRows];
};

struct Query {
  const void* data;  // [rows, heads, head dim]
  void* output;      // [rows, heads, head dim], contiguous
  int64_t row_stride;
  int64_t num_heads;
  int64_t window;  // tokens that a row sees, itself included; 0: all
  int64_t chunk;   // a row sees its own chunk of so many tokens, up to itself; 0: no chunks
  float scale;

  // The first token that a row at `position` sees.
  int64_t first_seen(int64_t position) const {
    if (chunk > 0) return position / chunk * chunk;
    return window > 0 && position >= window ? position + 1 - window : 0;
  }
};

// Some query rows of a sequence and KV head, against the tokens [begin, end). Rows are counted token by token, and
// within a token by the head of the group.
struct Job {
  int64_t seq;
  int64_t head;
  int64_t first_row;
  int64_t num_rows;
  int64_t begin;
  int64_t end;
  int64_t num_parts;  // into which the context of these rows is cut
  int64_t part;       // where this part's result is kept until all are there
};

// The tokens that are packed at once.
template <typename T>
struct Tile {
  int num_tokens;
  const T* slots[kTokens];  // where each token's key lies

  // Looks up the tokens from `start` on, none of them past the job's end.
  void find(const Cache& cache, int64_t layer, const Job& job, const int64_t* table, int64_t start) {
    const int64_t left = job.end - start;
    num_tokens = int(left < 0 ? 0 : left < kTokens ? left : kTokens);
    int64_t block = start / cache.block_size, offset = start % cache.block_size;
    for (int token = 0; token < num_tokens; ++block, offset = 0) {
      const T* slot = cache.slot<const T>(table[block], layer, 0, job.head, offset);
      for (; offset < cache.block_size && token < num_tokens; ++offset, ++token, slot += cache.head_dim)
        slots[token] = slot;
    }
  }
};

// What parts of a context give, one slot for each row of each part.
struct Parts {
  std::unique_ptr<float[]> sums;  // [parts, kRows, head dim]
  std::unique_ptr<float[]> largest;
  std::unique_ptr<float[]> total;

  Parts(int64_t count, int64_t head_dim)
      : sums(new float[count * kRows * head_dim]), largest(new float[count * kRows]), total(new float[count * kRows]) {}
};

// Computes a job; its sums, largest scores and totals are left in `scratch`.
template <typename Steps, typename T>
void attend(const StepRows& rows, const Cache& cache, const Query& query, int64_t layer, const Job& job,
            Scratch<Steps>& scratch) {
  const int head_dim = int(cache.head_dim);
  const int num_rows = int(job.num_rows);
  const int64_t group = query.num_heads / cache.num_kv_heads;
  const int64_t first_query = rows.row_starts[job.seq];
  const int64_t first_position = rows.context_lens[job.seq] - (rows.row_starts[job.seq + 1] - first_query);
  const int64_t* table = rows.block_ids + rows.block_starts[job.seq];
  for (int row = 0; row < num_rows; ++row) {
    const int64_t token = (job.first_row + row) / group, member = (job.first_row + row) % group;
    const T* from = static_cast<const T*>(query.data) + (first_query + token) * query.row_stride +
                    (job.head * group + member) * head_dim;
    for (int dim = 0; dim < head_dim; ++dim) narrow(scratch.queries + row * head_dim + dim, widen(from[dim]));
    std::memset(scratch.sums + row * kMaxDim, 0, head_dim * sizeof(float));
    scratch.largest[row] = -kInfinity;
    scratch.total[row] = 0.0f;
  }
  const bool is_few = num_rows <= kFewRows && head_dim % (2 * kLanes) == 0;
  const int64_t to_values = cache.num_kv_heads * cache.block_size * cache.head_dim;
  Tile<T> tile, next;
  next.find(cache, layer, job, table, job.begin);
  for (int64_t start = job.begin; start < job.end; start += kTokens) {
    tile = next;
    next.find(cache, layer, job, table, start + kTokens);
    const int num_tokens = tile.num_tokens;
    const auto clamp = [&](int64_t token) { return int(token < 0 ? 0 : token < num_tokens ? token : num_tokens); };
    if (is_few) {
      with_few(num_rows, [&](auto few) {
        score<Steps, few.value>(scratch.queries, tile.slots, to_values, num_tokens, head_dim, scratch.scores, kTokens);
      });
    } else {
      pack_columns<Steps, T>(tile.slots, to_values, num_tokens, head_dim, scratch.keys);
      multiply<Steps>(scratch.queries, head_dim, scratch.keys, head_dim / Steps::kValues, scratch.scores, kTokens,
                      nullptr, num_rows, num_tokens);
    }
    for (int row = 0; row < num_rows; ++row) {
      const int64_t position = first_position + (job.first_row + row) / group;
      scratch.rescale[row] = weigh(scratch.scores + row * kTokens, clamp(query.first_seen(position) - start),
                                   clamp(position + 1 - start), num_tokens, query.scale,
                                   scratch.weights + row * kTokens, scratch.largest[row], scratch.total[row]);
    }
    for (int token = 0; token < num_tokens; ++token) tile.slots[token] += to_values;
    if (is_few) {
      with_few(num_rows, [&](auto few) {
        add_values<Steps, few.value>(scratch.weights, kTokens, tile.slots, next.slots, num_tokens, next.num_tokens,
                                     head_dim, scratch.sums, kMaxDim, scratch.rescale);
      });
    } else {
      pack_values<Steps, T>(tile.slots, next.slots, num_tokens, next.num_tokens, head_dim, scratch.values);
      multiply<Steps>(scratch.weights, kTokens, scratch.values, (num_tokens + Steps::kValues - 1) / Steps::kValues,
                      scratch.sums, kMaxDim, scratch.rescale, num_rows, head_dim);
    }
  }
}

// Where a job's row goes: [head dim].
template <typename T>
T* output_row(const StepRows& rows, const Cache& cache, const Query& query, const Job& job, int row) {
  const int64_t group = query.num_heads / cache.num_kv_heads;
  const int64_t token = (job.first_row + row) / group, member = (job.first_row + row) % group;
  const int64_t head = job.head * group + member;
  return static_cast<T*>(query.output) +
         ((rows.row_starts[job.seq] + token) * query.num_heads + head) * cache.head_dim;
}

template <typename T>
void store_scaled(T* to, const float* from, int count, float factor) {
  int idx = 0;
  for (; idx + kLanes <= count; idx += kLanes) store(to + idx, load(from + idx) * factor);
  for (; idx < count; ++idx) narrow(to + idx, from[idx] * factor);
}

// Divides sums by their total; the result of a job that is not cut.
template <typename T, typename Steps>
void finish(const StepRows& rows, const Cache& cache, const Query& query, const Job& job, Scratch<Steps>& scratch) {
  for (int row = 0; row < job.num_rows; ++row) {
    T* output = output_row<T>(rows, cache, query, job, row);
    store_scaled(output, scratch.sums + row * kMaxDim, int(cache.head_dim), 1.0f / scratch.total[row]);
  }
}

template <typename Steps>
void keep(const Cache& cache, const Job& job, const Scratch<Steps>& scratch, Parts& parts) {
  for (int row = 0; row < job.num_rows; ++row) {
    const int64_t slot = job.part * kRows + row;
    std::memcpy(&parts.sums[slot * cache.head_dim], scratch.sums + row * kMaxDim, cache.head_dim * sizeof(float));
    parts.largest[slot] = scratch.largest[row];
    parts.total[slot] = scratch.total[row];
  }
}

// Joins the parts of a context; `job` is the first of them. Always in the same order, so the result is always the same.
template <typename T>
void merge(const StepRows& rows, const Cache& cache, const Query& query, const Job& job, const Parts& parts) {
  std::vector<float> sums(cache.head_dim);
  for (int row = 0; row < job.num_rows; ++row) {
    float largest = -kInfinity;
    for (int64_t part = job.part; part < job.part + job.num_parts; ++part)
      largest = parts.largest[part * kRows + row] > largest ? parts.largest[part * kRows + row] : largest;
    float total = 0.0f;
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t part = job.part; part < job.part + job.num_parts; ++part) {
      const int64_t slot = part * kRows + row;
      if (parts.total[slot] == 0.0f) continue;  // the row sees nothing of this part
      const float factor = exponential(splat(parts.largest[slot] - largest))[0];
      total += parts.total[slot] * factor;
      for (int64_t dim = 0; dim < cache.head_dim; ++dim) sums[dim] += parts.sums[slot * cache.head_dim + dim] * factor;
    }
    T* output = output_row<T>(rows, cache, query, job, row);
    store_scaled(output, sums.data(), int(cache.head_dim), 1.0f / total);
  }
}

// Cuts a step into jobs; the parts of a context come one behind the other.
std::vector<Job> jobs_of(const StepRows& rows, const Cache& cache, const Query& query, int64_t& num_parts) {
  const int64_t group = query.num_heads / cache.num_kv_heads;
  std::vector<Job> jobs;
  num_parts = 0;
  for (int64_t seq = 0; seq < rows.num_seqs; ++seq) {
    const int64_t num_tokens = rows.row_starts[seq + 1] - rows.row_starts[seq];
    const int64_t num_rows = num_tokens * group;
    for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
      for (int64_t first = 0; first < num_rows; first += kRows) {
        const int64_t count = num_rows - first < kRows ? num_rows - first : kRows;
        const int64_t first_position = rows.context_lens[seq] - num_tokens + first / group;
        const int64_t end = rows.context_lens[seq] - num_tokens + (first + count - 1) / group + 1;
        const int64_t seen = query.first_seen(first_position);
        // Parts start at multiples of their length. A chunk has rows enough without them.
        const int64_t first_part = seen / kPartTokens;
        const int64_t parts = num_rows <= kRows ? (end - 1) / kPartTokens - first_part + 1 : 1;
        for (int64_t part = 0; part < parts; ++part) {
          const int64_t cut = (first_part + part) * kPartTokens;
          const int64_t from = part > 0 ? cut : seen, to = part + 1 < parts ? cut + kPartTokens : end;
          jobs.push_back({seq, head, first, count, from, to, parts, num_parts + part});
        }
        if (parts > 1) num_parts += parts;
      }
    }
  }
  return jobs;
}

template <typename T>
void attend_all(const StepRows& rows, const Cache& cache, const Query& query, int64_t layer) {
  using Steps = typename StepsOf<T>::Type;
  int64_t num_parts;
  const std::vector<Job> jobs = jobs_of(rows, cache, query, num_parts);
  Parts parts(num_parts, cache.head_dim);
  quire::in_turns(int64_t(jobs.size()), [&](int64_t idx) {
    thread_local std::unique_ptr<Scratch<Steps>> scratch(new Scratch<Steps>);
    const Job& job = jobs[idx];
    attend<Steps, T>(rows, cache, query, layer, job, *scratch);
    if (job.num_parts == 1) {
      finish<T>(rows, cache, query, job, *scratch);
    } else {
      keep(cache, job, *scratch, parts);
    }
  });
  if (num_parts == 0) return;
  std::vector<Job> firsts;
  for (size_t idx = 0; idx < jobs.size(); idx += jobs[idx].num_parts)
    if (jobs[idx].num_parts > 1) firsts.push_back(jobs[idx]);
  quire::in_parallel(int64_t(firsts.size()), 16, [&](int64_t begin, int64_t end) {
    for (int64_t idx = begin; idx < end; ++idx) merge<T>(rows, cache, query, firsts[idx], parts);
  });
}

}  // namespace

// Lets each row of a step see its sequence up to itself. The cache's heads are of at most 256 values, an even number.
QUIRE_EXPORT void quire_attend(const StepRows* rows, const Cache* cache, int64_t layer, const void* queries,
                               int64_t row_stride, int64_t num_heads, float scale, int64_t window, int64_t chunk,
                               void* output) {
  const Query query{queries, output, row_stride, num_heads, window, chunk, scale};
  with_type(cache->type, [&](auto* type) { attend_all<std::remove_pointer_t<decltype(type)>>(*rows, *cache, query, layer); });
}
