#include "core/rollout_plan.h"

#include <algorithm>
#include <utility>

namespace agl {

void RolloutPlan::add(CallClass call_class, const TokenReader& prompt, const TokenReader& response,
                      std::shared_ptr<const float[]> log_probs, TokenPositions positions,
                      Chains::Position from) {
  PlannedCall planned{call_class, -1, prompt.size(), response.size(), {}, false};
  if (call_class == CallClass::kLaidOut) {
    const auto call = static_cast<int32_t>(calls_.size());
    if (level_ == Level::kTree) {
      planned.chain = tree_.add(call, prompt, response, log_probs.get(), from);
    } else {
      const Placement placed =
          level_ == Level::kTrajectory
              ? chains_.add(call, prompt, response, log_probs.get(), std::move(positions), from)
              : chains_.add_alone(call, prompt, response, log_probs.get(), std::move(positions));
      planned.chain = placed.chain;
      if (placed.mismatched) {
        mismatches_.push_back({call, placed.chain, placed.closest, placed.index,
                               placed.closest_context, placed.kind});
      }
    }
    if (log_probs) log_probs_.push_back(std::move(log_probs));
  }
  calls_.push_back(std::move(planned));
}

void RolloutPlan::reserve(int64_t tokens) {
  if (level_ == Level::kTrajectory) chains_.reserve(tokens);
  tree_.reserve(tokens);
}

void RolloutPlan::forget_echoes() {
  chains_.forget_echoes();
  tree_.forget_echoes();
}

void RolloutPlan::recycle() {
  chains_.recycle();
  tree_.recycle();
}

void RolloutPlan::keep_context(const TokenReader& prompt, const TokenReader& response) {
  std::vector<int32_t>& context = calls_.back().context;
  context.resize(static_cast<std::size_t>(prompt.size() + response.size()));
  prompt.copy(0, prompt.size(), context.data());
  response.copy(0, response.size(), context.data() + prompt.size());
}

std::vector<int32_t> RolloutPlan::context_of(const PlannedCall& call) const {
  if (call.chain < 0) return call.context;
  const int64_t size = call.prompt_length + call.response_length;
  std::vector<int32_t> context(static_cast<std::size_t>(size));
  if (level_ == Level::kTree) {
    tree_.copy_path(call.chain, 0, static_cast<int32_t>(size), context.data());
  } else {
    const int32_t* tokens = chains_.list()[static_cast<std::size_t>(call.chain)].tokens.data();
    std::copy(tokens, tokens + size, context.begin());
  }
  return context;
}

RolloutCounts count_calls(const RolloutPlan& plan) {
  RolloutCounts counts;
  for (const PlannedCall& call : plan.calls()) {
    counts.sampled += call.response_length;
    counts.clashes += call.clashes ? 1 : 0;
    switch (call.call_class) {
      case CallClass::kLaidOut:
        break;
      case CallClass::kDuplicate:
        counts.duplicate += call.response_length;
        break;
      case CallClass::kAborted:
        counts.dropped[kAborted] += call.response_length;
        break;
      case CallClass::kExcluded:
        counts.dropped[kExcluded] += call.response_length;
        break;
      case CallClass::kEmpty:
        counts.dropped[kEmpty] += call.response_length;
        ++counts.empty_calls;
        break;
    }
  }
  return counts;
}

}  // namespace agl
