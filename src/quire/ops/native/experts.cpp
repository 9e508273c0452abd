// Experts with a router in one call: a step of few rows runs two small products for each expert that a row goes
// through, and the overhead of a caller in Python for each of them exceeds the running time of some.
//
// Rows are brought together by expert, and by adapter within an expert. What adapters add to the products of an expert
// is their residual, which the threads that run the expert compute.
//
// Outputs are added in float32 and always in the order of the experts: a row gets the same bits, whatever rows are
// beside it.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "experts.h"
#include "parallel.h"

namespace {

constexpr int64_t kNoAdapter = -1;

struct Choice {
  int64_t row;
  int64_t adapter;  // slot of the row's adapter, or kNoAdapter
  float score;
};

// The rows of an expert that have an adapter, which are its first ones: the slot of each adapter and expert, and where
// its rows begin and end.
struct AdaptedRows {
  std::vector<int64_t> slots;
  std::vector<int64_t> starts;
};

constexpr int64_t kGrain = 1 << 14;  // number of values that justifies a second thread
// Number of rows up to which threads stay together, and run whole experts side by side: the products of more rows take
// so long that neither matters.
constexpr int64_t kFewRows = 32;

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

bool is_local(const Expert& expert) { return expert.down.kernel != nullptr; }

// Returns the number of gated columns of an expert of this rank.
int64_t local_width(const Experts& experts) {
  const Expert* const end = experts.experts + experts.num_experts;
  const Expert* const found = std::find_if(experts.experts, end, is_local);
  return found == end ? 0 : found->down.width;
}

// Chooses the experts of a row, given its logits, which become scores: those with the highest scores, of equal ones the
// first.
void choose(const Experts& experts, float* logits, int64_t* chosen, float* scores) {
  float largest = -kInfinity, sum = 0;
  for (int64_t idx = 0; idx < experts.num_experts; ++idx) {
    logits[idx] *= float(experts.logit_scale);
    if (logits[idx] > largest) largest = logits[idx];
  }
  if (!experts.is_sigmoid) {
    for (int64_t idx = 0; idx < experts.num_experts; ++idx) sum += std::exp(logits[idx] - largest);
    largest += std::log(sum);
  }
  const auto score_of = [&](int64_t idx) {
    return experts.is_sigmoid ? sigmoid(logits[idx]) : std::exp(logits[idx] - largest);
  };
  std::vector<float> best(experts.num_chosen);
  for (int64_t idx = 0, num_best = 0; idx < experts.num_experts; ++idx) {
    // Scores rise with logits, which tell apart what is equal after rounding.
    const float value = experts.choice_bias ? score_of(idx) + experts.choice_bias[idx] : logits[idx];
    if (num_best == experts.num_chosen && !(value > best[num_best - 1])) continue;
    if (num_best < experts.num_chosen) ++num_best;
    int64_t place = num_best - 1;
    for (; place > 0 && !(best[place - 1] >= value); --place) {
      best[place] = best[place - 1];
      chosen[place] = chosen[place - 1];
    }
    best[place] = value;
    chosen[place] = idx;
  }
  float total = float(experts.sum_eps);
  for (int64_t place = 0; place < experts.num_chosen; ++place) total += scores[place] = score_of(chosen[place]);
  for (int64_t place = 0; place < experts.num_chosen; ++place) {
    if (experts.is_renormalised) scores[place] /= total;
    scores[place] *= float(experts.score_scale);
    if (experts.expert_scales) scores[place] *= experts.expert_scales[chosen[place]];
  }
}

// Adds the values of a row, multiplied by a factor.
template <typename T>
QUIRE_INLINE void add_scaled(const T* from, float factor, int64_t width, float* to) {
  int64_t idx = 0;
  for (; idx + kLanes <= width; idx += kLanes) store(to + idx, load(to + idx) + load(from + idx) * factor);
  for (; idx < width; ++idx) to[idx] += widen(from[idx]) * factor;
}

// Copies a row, multiplied by a factor.
template <typename T>
QUIRE_INLINE void copy_scaled(const T* from, float factor, int64_t width, T* to) {
  for (int64_t idx = 0; idx < width; ++idx) narrow(to + idx, widen(from[idx]) * factor);
}

template <typename T>
class Mixture {
 public:
  Mixture(Type type, const Experts& experts, int64_t num_rows, const T* x)
      : type_(type),
        experts_(experts),
        num_rows_(num_rows),
        width_(experts.router.width),
        inner_width_(std::max(local_width(experts), experts.shared.down.width)),
        is_few_(num_rows <= kFewRows),
        adapted_(experts.step_adapters == nullptr ? nullptr : experts.step_adapters->at(num_rows)),
        x_(x) {
    // Of few rows, each choice has its own part of the buffers; of more, experts use the same one after the other.
    const int64_t num_places = num_rows * (is_few_ ? std::max(int64_t(1), experts.num_chosen) : 1);
    const int64_t num_logits = num_rows * experts.num_experts;
    buffer_.reset(new T[num_places * (2 * width_ + inner_width_) + num_logits]);
    seen_ = buffer_.get();
    given_ = seen_ + num_places * width_;
    inner_ = given_ + num_places * width_;
    logits_ = inner_ + num_places * inner_width_;
    sums_.reset(new float[num_rows * width_]);
  }

  void run(const T* routed, const T* start, T* output) {
    route(routed);
    begin(start);
    if (is_few_) {
      add_side_by_side();
    } else {
      for (const int64_t idx : present_) {
        run_expert(idx);
        for_columns([&](int64_t first, int64_t count) { add_outputs(idx, first, count); });
      }
    }
    for_rows(num_rows_, [&](int64_t row) {
      for (int64_t idx = 0; idx < width_; ++idx) narrow(output + row * width_ + idx, sums_[row * width_ + idx]);
    });
  }

 private:
  template <typename Body>
  void for_rows(int64_t num_rows, Body body) {
    quire::in_parallel(num_rows, kGrain / width_ + 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) body(row);
    });
  }

  // Chooses the experts of all rows, and lists the rows of each expert.
  void route(const T* routed) {
    const int64_t num_experts = experts_.num_experts, num_chosen = experts_.num_chosen;
    experts_.router(type_, routed, num_rows_, nullptr, logits_);
    std::vector<int64_t> chosen(num_rows_ * num_chosen);
    std::vector<float> scores(num_rows_ * num_chosen);
    quire::in_parallel(num_rows_, 16, [&](int64_t begin, int64_t end) {
      std::vector<float> logits(num_experts);
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t idx = 0; idx < num_experts; ++idx) logits[idx] = widen(logits_[row * num_experts + idx]);
        choose(experts_, logits.data(), chosen.data() + row * num_chosen, scores.data() + row * num_chosen);
      }
    });
    starts_.assign(num_experts + 1, 0);
    for (const int64_t idx : chosen) ++starts_[idx + 1];
    for (int64_t idx = 0; idx < num_experts; ++idx) {
      if (starts_[idx + 1] > 0 && is_local(experts_.experts[idx])) present_.push_back(idx);
      starts_[idx + 1] += starts_[idx];
    }
    list_choices(chosen, scores);
  }

  // Lists the choices of each expert: rows of an adapter follow each other, those without one come last.
  void list_choices(const std::vector<int64_t>& chosen, const std::vector<float>& scores) {
    const int64_t num_chosen = experts_.num_chosen;
    choices_.resize(chosen.size());
    std::vector<int64_t> next(starts_.begin(), starts_.end() - 1);
    const auto add_row = [&](int64_t row, int64_t adapter) {
      for (int64_t place = row * num_chosen; place < (row + 1) * num_chosen; ++place)
        choices_[next[chosen[place]]++] = {row, adapter, scores[place]};
    };
    std::vector<char> is_added(num_rows_, 0);
    for (int64_t group = 0; adapted_ != nullptr && group < adapted_->num_groups; ++group) {
      for (int64_t place = adapted_->starts[group]; place < adapted_->starts[group + 1]; ++place) {
        const int64_t row = adapted_->rows[place];
        is_added[row] = 1;
        add_row(row, adapted_->slots[group]);
      }
    }
    for (int64_t row = 0; row < num_rows_; ++row)
      if (!is_added[row]) add_row(row, kNoAdapter);
    places_.resize(adapted_ == nullptr ? 0 : num_rows_);
    std::iota(places_.begin(), places_.end(), int64_t(0));
  }

  // Sets the sums to what experts are added to: `start`, if there is one, and the output of the shared expert.
  void begin(const T* start) {
    const bool is_shared = experts_.shared.down.kernel != nullptr, is_gated = experts_.shared_gate.kernel != nullptr;
    if (is_shared) {
      experts_.shared.gate_up(type_, x_, num_rows_, nullptr, inner_);
      experts_.shared.down(type_, inner_, num_rows_, is_gated ? nullptr : start, given_);
    }
    if (is_gated) experts_.shared_gate(type_, x_, num_rows_, nullptr, seen_);
    for_rows(num_rows_, [&](int64_t row) {
      float* const sums = sums_.get() + row * width_;
      std::fill_n(sums, width_, 0.0f);
      if (start != nullptr && (is_gated || !is_shared)) add_scaled(start + row * width_, 1.0f, width_, sums);
      const float factor = is_gated ? sigmoid(widen(seen_[row])) : 1.0f;
      if (is_shared) add_scaled(given_ + row * width_, factor, width_, sums);
    });
  }

  // Each thread runs whole experts, as many as the others; what is left over is shared by all threads.
  void add_side_by_side() {
    const int64_t num_present = int64_t(present_.size()), num_threads = quire::max_threads();
    const int64_t num_whole = num_present / num_threads * num_threads;
    quire::in_turns(num_whole, [&](int64_t job) { run_expert(present_[job]); });
    for (int64_t idx = num_whole; idx < num_present; ++idx) run_expert(present_[idx]);
    for_columns([&](int64_t first, int64_t count) {
      for (const int64_t idx : present_) add_outputs(idx, first, count);
    });
  }

  // Returns where the rows of an expert begin in the buffers.
  int64_t place_of(int64_t expert) const { return is_few_ ? starts_[expert] : 0; }
  int64_t count_of(int64_t expert) const { return starts_[expert + 1] - starts_[expert]; }

  // Computes an expert's outputs for the rows that go through it.
  void run_expert(int64_t idx) {
    const Expert& expert = experts_.experts[idx];
    const Choice* const choices = choices_.data() + starts_[idx];
    const int64_t place = place_of(idx), count = count_of(idx);
    T* const seen = seen_ + place * width_;
    for_rows(count, [&](int64_t row) {
      const T* const from = x_ + choices[row].row * width_;
      T* const to = seen + row * width_;
      if (experts_.is_input_scaled)
        copy_scaled(from, choices[row].score, width_, to);
      else
        std::copy_n(from, width_, to);
    });
    T* const inner = inner_ + place * inner_width_;
    const AdaptedRows adapted = adapted_rows(idx);
    const LoraRows rows{int64_t(adapted.slots.size()), adapted.slots.data(), adapted.starts.data(), places_.data()};
    const StepAdapters step{&rows, nullptr, count};
    multiply(expert.gate_up, experts_.gate_up_adapters, step, seen, inner);
    multiply(expert.down, experts_.down_adapters, step, inner, given_ + place * width_);
  }

  // Returns the rows of an expert that have an adapter; `starts` are places among its rows.
  AdaptedRows adapted_rows(int64_t idx) const {
    AdaptedRows adapted;
    if (adapted_ == nullptr) return adapted;
    adapted.starts.push_back(0);
    const Choice* const choices = choices_.data() + starts_[idx];
    for (int64_t row = 0; row < count_of(idx) && choices[row].adapter != kNoAdapter; ++row) {
      const int64_t slot = choices[row].adapter * experts_.num_local + idx - experts_.first_local;
      if (adapted.slots.empty() || adapted.slots.back() != slot) {
        adapted.slots.push_back(slot);
        adapted.starts.push_back(row);
      }
      adapted.starts.back() = row + 1;
    }
    return adapted;
  }

  // Multiplies all rows of an expert, with what their adapters add.
  void multiply(const Linear& linear, const LoraTable* table, const StepAdapters& step, const T* x, T* output) const {
    if (table == nullptr || step.all->num_groups == 0) return linear(type_, x, step.num_rows, nullptr, output);
    const AdaptedLinear adapted{linear, table, &step};
    quire_adapted_linear(type_, x, linear.width, step.num_rows, &adapted, linear.num_columns, linear.width, linear.bias,
                         nullptr, linear.gate, output);
  }

  // Calls `body(first, count)` for ranges of columns.
  template <typename Body>
  void for_columns(Body body) {
    constexpr int64_t kColumns = 64;
    const int64_t num_values = int64_t(choices_.size()) * kColumns;
    quire::in_parallel((width_ + kColumns - 1) / kColumns, kGrain / (num_values + 1) + 1,
                       [&](int64_t begin, int64_t end) {
                         body(begin * kColumns, std::min(width_, end * kColumns) - begin * kColumns);
                       });
  }

  // Adds some columns of an expert's outputs.
  void add_outputs(int64_t idx, int64_t first, int64_t count) {
    const Choice* const choices = choices_.data() + starts_[idx];
    const T* const given = given_ + place_of(idx) * width_ + first;
    for (int64_t row = 0; row < count_of(idx); ++row) {
      const float factor = experts_.is_input_scaled ? 1.0f : choices[row].score;
      add_scaled(given + row * width_, factor, count, sums_.get() + choices[row].row * width_ + first);
    }
  }

  const Type type_;
  const Experts& experts_;
  const int64_t num_rows_;
  const int64_t width_;
  const int64_t inner_width_;
  const bool is_few_;
  const LoraRows* const adapted_;  // rows of the step that have an adapter, or null
  const T* const x_;
  std::unique_ptr<T[]> buffer_;
  std::unique_ptr<float[]> sums_;
  T* seen_;
  T* given_;
  T* inner_;
  T* logits_;
  std::vector<int64_t> starts_;   // [num_experts + 1], of each expert in `choices_`
  std::vector<int64_t> present_;  // experts of this rank that a row goes through, in order
  std::vector<Choice> choices_;
  std::vector<int64_t> places_;  // 0, 1, ...: rows of any expert
};

}  // namespace

// Adds to `start` [num_rows, width], which may be null for nothing, what the experts of each row make of `x`. The
// router sees `routed`. Where rows of the step have adapters of experts, their products are computed with these.
QUIRE_EXPORT void quire_experts(Type type, const Experts* experts, int64_t num_rows, const void* x, const void* routed,
                                const void* start, void* output) {
  with_type(type, [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    const auto run = [&] {
      Mixture<T>(type, *experts, num_rows, static_cast<const T*>(x))
          .run(static_cast<const T*>(routed), static_cast<const T*>(start), static_cast<T*>(output));
    };
    if (num_rows <= kFewRows) return quire::together(run);
    run();
  });
}
