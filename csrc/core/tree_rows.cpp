#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "core/rollout_plan.h"

namespace agl {
namespace {

// The runs depth first: behind each those that branch off it, the deepest first, then as they came.
std::vector<int32_t> depth_first(const std::vector<Run>& runs) {
  const auto of = [&](int32_t id) -> const Run& { return runs[static_cast<std::size_t>(id)]; };
  std::vector<int32_t> by_parent(runs.size());
  std::iota(by_parent.begin(), by_parent.end(), 0);
  std::stable_sort(by_parent.begin(), by_parent.end(), [&](int32_t a, int32_t b) {
    return std::make_pair(of(a).parent, -of(a).begin) < std::make_pair(of(b).parent, -of(b).begin);
  });
  std::vector<std::size_t> first(runs.size() + 2);  // in by_parent, of the children of run i - 1
  for (const Run& run : runs) ++first[static_cast<std::size_t>(run.parent + 2)];
  std::partial_sum(first.begin(), first.end(), first.begin());

  std::vector<int32_t> order;
  std::vector<int32_t> waiting;
  const auto push_children = [&](int32_t parent) {
    const auto slot = static_cast<std::size_t>(parent + 1);
    for (std::size_t i = first[slot + 1]; i > first[slot]; --i) waiting.push_back(by_parent[i - 1]);
  };
  push_children(-1);
  while (!waiting.empty()) {
    order.push_back(waiting.back());
    waiting.pop_back();
    push_children(order.back());
  }
  return order;
}

// A call that has a place in a row, and how much of its path that of the call before it shares.
struct Placed {
  int32_t run;
  int32_t end;
  int32_t shared;

  int32_t added() const { return end - shared; }
};

// The calls depth first, without those that are longer than a row may be.
std::vector<Placed> place_calls(const std::vector<Run>& runs, int64_t max_tokens,
                                RolloutCounts& counts) {
  constexpr int32_t kAll = std::numeric_limits<int32_t>::max();
  std::vector<Placed> placed;
  int32_t shared = kAll;
  for (const int32_t id : depth_first(runs)) {
    const Run& run = runs[static_cast<std::size_t>(id)];
    // Depth first, two paths share no more than any neighbours between them do.
    shared = std::min(shared, run.begin);
    if (run.end > max_tokens) {
      counts.dropped[kOverlongCall] += run.response_length();
      continue;
    }
    placed.push_back({id, run.end, placed.empty() ? 0 : shared});
    shared = kAll;
  }
  return placed;
}

// How many calls each row takes, in order, for the fewest tokens in all, then the fewest rows; of
// equals the first row takes the most. A row repeats what its first call shares with the one
// before.
std::vector<std::size_t> deal_out(const std::vector<Placed>& calls, int64_t max_tokens) {
  const auto add = [](int64_t tokens, const Placed& call) { return tokens + call.added(); };
  if (std::accumulate(calls.begin(), calls.end(), int64_t{0}, add) <= max_tokens) {
    return {calls.size()};
  }
  struct Best {
    int64_t tokens = 0;
    int64_t rows = 0;
    std::size_t next = 0;  // where the second row begins
  };
  std::vector<Best> from(calls.size() + 1);
  for (std::size_t i = calls.size(); i-- > 0;) {
    Best& best = from[i] = {std::numeric_limits<int64_t>::max(), 0, 0};
    int64_t tokens = calls[i].end;
    for (std::size_t next = i + 1;; ++next) {
      const Best& rest = from[next];
      const auto found = std::make_pair(tokens + rest.tokens, rest.rows + 1);
      if (found <= std::make_pair(best.tokens, best.rows)) best = {found.first, found.second, next};
      if (next == calls.size()) break;
      tokens = add(tokens, calls[next]);
      if (tokens > max_tokens) break;
    }
  }
  std::vector<std::size_t> sizes;
  for (std::size_t i = 0; i < calls.size(); i = from[i].next) sizes.push_back(from[i].next - i);
  return sizes;
}

// Appends a run's path from depth `shared` on to the set's last row; what lies before is in it.
// `depth` is that of the row's next token if it goes on by one, 0 where the row is empty.
void append_run(RowSet& set, const CallTree& tree, int32_t id, int32_t shared, int32_t depth) {
  const Run& run = tree.runs()[static_cast<std::size_t>(id)];
  Row& row = set.rows.back();
  const auto add_segment = [&](int32_t length, int32_t call, const float* log_probs) {
    row.response_length += length;
    set.segments.push_back({row.response_length, call, log_probs});
    ++row.num_segments;
  };
  const std::size_t before = set.tokens.size();
  set.tokens.resize(before + static_cast<std::size_t>(run.end - shared));
  tree.copy_path(id, shared, run.end, set.tokens.data() + before);
  if (depth > 0) {  // else what comes before the response is the row's prompt
    if (shared != depth) {
      set.jumps.push_back({row.response_length, shared});
      ++row.num_jumps;
    }
    if (run.prompt_length > shared) add_segment(run.prompt_length - shared, -1, nullptr);
  }
  add_segment(run.response_length(), run.call, run.log_probs);
  set.has_log_probs.back() &= run.log_probs != nullptr;
  set.any_log_probs |= run.log_probs != nullptr;
}

// Lays one rollout's tree out in rows and counts where its sampled tokens went.
void add_tree(RowSet& set, const RolloutPlan& plan, std::size_t rollout, float reward,
              int64_t max_tokens) {
  RolloutCounts& counts = set.counts[rollout] = count_calls(plan);
  const std::vector<Run>& runs = plan.tree().runs();
  const std::vector<Placed> calls = place_calls(runs, max_tokens, counts);
  if (calls.empty()) return;
  const Placed* call = calls.data();
  for (const std::size_t size : deal_out(calls, max_tokens)) {
    const Run& first = runs[static_cast<std::size_t>(call->run)];
    Row row{};
    row.prompt_length = first.prompt_length;
    row.score = reward;
    set.rows.push_back(row);
    set.rollout.push_back(static_cast<int32_t>(rollout));
    set.first_call.push_back(first.call);
    set.marked.push_back(0);
    set.has_log_probs.push_back(1);
    int32_t depth = 0;
    for (const Placed* const end = call + size; call != end; ++call) {
      append_run(set, plan.tree(), call->run, depth > 0 ? call->shared : 0, depth);
      depth = call->end;
      counts.trained += runs[static_cast<std::size_t>(call->run)].response_length();
    }
    ++counts.rows;
    ++counts.chains;
  }
}

// Only now does everything stay where it is.
void set_pointers(RowSet& set) {
  const int32_t* token = set.tokens.data();
  const Segment* segment = set.segments.data();
  const Jump* jump = set.jumps.data();
  for (Row& row : set.rows) {
    row.prompt = token;
    row.response = token + row.prompt_length;
    row.segments = segment;
    row.jumps = jump;
    token = row.response + row.response_length;
    segment += row.num_segments;
    jump += row.num_jumps;
    set.longest.prompt = std::max<int64_t>(set.longest.prompt, row.prompt_length);
    set.longest.response = std::max<int64_t>(set.longest.response, row.response_length);
    set.prompt_tokens += row.prompt_length;
    set.response_tokens += row.response_length;
  }
}

}  // namespace

RowSet make_tree_rows(Plans plans, const float* rewards, int64_t max_tokens) {
  RowSet set;
  set.counts.resize(plans.size());
  for (std::size_t i = 0; i < plans.size(); ++i) {
    add_tree(set, *plans[i], i, rewards[i], max_tokens);
  }
  set_pointers(set);
  set.plans = std::move(plans);
  return set;
}

}  // namespace agl
