#include <algorithm>
#include <utility>

#include "core/rollout_plan.h"

namespace agl {
namespace {

// A chain's row before its batch is known, with what the cut left of its sampled tokens.
struct CutChain {
  Row row{};
  int32_t first_call = 0;
  int64_t sampled = 0;
  int64_t kept = 0;  // sampled tokens inside the row
  bool overlong = false;
  bool cut = false;
  bool all_log_probs = true;
  bool any_log_probs = false;
};

// Cuts a chain and appends its row's segments. The row ends with its last sampled token.
CutChain cut_chain(const Chain& chain, const RowOptions& options, std::vector<Segment>& segments) {
  CutChain out;
  out.first_call = chain.first_call;
  const int64_t prompt = std::min<int64_t>(chain.prompt_length, options.prompt);
  const bool too_long = chain.prompt_length > options.prompt;
  out.overlong = too_long && options.drop_overlong;
  const int64_t spill = too_long && !options.drop_overlong ? chain.prompt_length - prompt : 0;
  const int64_t limit = options.total > 0
                            ? std::clamp<int64_t>(options.total - prompt, 0, options.response)
                            : options.response;
  const std::size_t first_segment = segments.size();
  if (spill > 0) segments.push_back({static_cast<int32_t>(spill), -1, nullptr});

  int64_t begin = spill;
  int64_t length = 0;  // of the row's response so far
  for (const Segment& segment : chain.segments) {
    const int64_t end = spill + segment.end;
    if (segment.call >= 0) out.sampled += end - begin;
    const int64_t kept_end = std::min(end, limit);
    if (kept_end > begin) {
      segments.push_back({static_cast<int32_t>(kept_end), segment.call, segment.log_probs});
      if (segment.call >= 0) {
        out.kept += kept_end - begin;
        out.all_log_probs &= segment.log_probs != nullptr;
        out.any_log_probs |= segment.log_probs != nullptr;
        length = kept_end;
      }
    }
    begin = end;
  }
  out.cut = begin > limit;
  while (segments.size() > first_segment && segments.back().end > length) segments.pop_back();

  const int64_t response_at = spill > 0 ? prompt : chain.prompt_length;
  out.row.prompt = chain.tokens.data();
  out.row.response = chain.tokens.data() + response_at;
  if (chain.positions.values) {
    out.row.prompt_positions = chain.positions.of_dim(0);
    out.row.response_positions = chain.positions.of_dim(0) + response_at;
    out.row.position_stride = chain.positions.length;
  }
  out.row.prompt_length = static_cast<int32_t>(prompt);
  out.row.response_length = static_cast<int32_t>(length);
  out.row.num_segments = static_cast<int32_t>(segments.size() - first_segment);
  return out;
}

void add_row(RowSet& set, const CutChain& cut, std::size_t rollout, bool marked) {
  set.rows.push_back(cut.row);
  set.rollout.push_back(static_cast<int32_t>(rollout));
  set.first_call.push_back(cut.first_call);
  set.marked.push_back(marked);
  set.has_log_probs.push_back(cut.all_log_probs);
  set.any_log_probs |= cut.any_log_probs;
  set.longest.prompt = std::max<int64_t>(set.longest.prompt, cut.row.prompt_length);
  set.longest.response = std::max<int64_t>(set.longest.response, cut.row.response_length);
  set.prompt_tokens += cut.row.prompt_length;
  set.response_tokens += cut.row.response_length;
}

// Cuts one rollout's chains into rows and counts where its sampled tokens went.
void add_rollout(RowSet& set, const RolloutPlan& plan, std::size_t rollout, float reward,
                 const RowOptions& options) {
  RolloutCounts& counts = set.counts[rollout] = count_calls(plan);

  std::vector<CutChain> cuts;
  cuts.reserve(plan.chains().list().size());
  for (const Chain& chain : plan.chains().list()) {
    cuts.push_back(cut_chain(chain, options, set.segments));
    counts.lost_tokens |= !cuts.back().overlong && cuts.back().kept < cuts.back().sampled;
  }
  const bool mask = counts.lost_tokens && options.mask_truncated;
  if (counts.lost_tokens && options.zero_truncated) reward = 0;

  for (CutChain& cut : cuts) {
    const bool has_row = cut.kept > 0;
    if (cut.overlong) {
      counts.dropped[kOverlongPrompt] += cut.sampled;
    } else if (mask && has_row) {
      counts.dropped[kTruncatedRollout] += cut.sampled;
    } else {
      counts.trained += cut.kept;
      counts.truncated += cut.sampled - cut.kept;
    }
    ++counts.chains;
    counts.cut_chains += cut.cut;
    counts.rows += has_row;
    counts.empty_rows += !has_row;
    cut.row.score = reward;
    if (has_row) add_row(set, cut, rollout, cut.overlong || mask);
  }
}

}  // namespace

RowSet make_rows(Plans plans, const float* rewards, const RowOptions& options) {
  if (options.level == Level::kTree) return make_tree_rows(std::move(plans), rewards, options.tree);
  RowSet set;
  set.counts.resize(plans.size());
  for (std::size_t i = 0; i < plans.size(); ++i) {
    add_rollout(set, *plans[i], i, rewards[i], options);
  }
  const Segment* next = set.segments.data();  // only now do segments stay where they are
  for (Row& row : set.rows) {
    row.segments = next;
    next += row.num_segments;
  }
  set.plans = std::move(plans);
  return set;
}

}  // namespace agl
