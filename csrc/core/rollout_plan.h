#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/call_tree.h"
#include "core/chains.h"
#include "core/row_options.h"
#include "core/rows.h"

namespace agl {

// What becomes of a call, in the order the rules are asked.
enum class CallClass : uint8_t { kLaidOut, kDuplicate, kAborted, kExcluded, kEmpty };

struct PlannedCall {
  CallClass call_class;
  int32_t chain;  // at level tree its run; -1 unless laid out
  int64_t prompt_length;
  int64_t response_length;
  std::vector<int32_t> context;  // prompt and response, only of calls not laid out that are kept
  bool clashes = false;          // an earlier call has its response_id, but other ids
};

struct PlannedMismatch {
  int32_t call;
  int32_t chain;  // the chain the call opened
  int32_t closest;
  int64_t index;
  int64_t closest_context;
  MismatchKind kind;
};

// One rollout's calls, merged into chains or into a tree as they come.
class RolloutPlan {
 public:
  // `spare` outlives the plan.
  RolloutPlan(Level level, SpareTokens* spare) : level_(level), chains_(spare), tree_(spare) {}

  // Room for the longest context, before the first call.
  void reserve(int64_t tokens);

  // `log_probs`: one per response token, or null. `positions`: not at level tree.
  void add(CallClass call_class, const TokenReader& prompt, const TokenReader& response,
           std::shared_ptr<const float[]> log_probs, TokenPositions positions,
           Chains::Position from = {});

  // Lets later calls refer to the last call's tokens although it was not laid out.
  void keep_context(const TokenReader& prompt, const TokenReader& response);

  // The last call shares its response_id with an earlier one that has other ids.
  void mark_clash() { calls_.back().clashes = true; }

  // Prompt and response of a call that is laid out or whose context is kept.
  std::vector<int32_t> context_of(const PlannedCall& call) const;

  // As for Chains and CallTree.
  void forget_echoes();
  void recycle();

  Level level() const { return level_; }
  const Chains& chains() const { return chains_; }  // empty at level tree
  const CallTree& tree() const { return tree_; }    // empty at the other levels
  const std::vector<PlannedCall>& calls() const { return calls_; }
  const std::vector<PlannedMismatch>& mismatches() const { return mismatches_; }

 private:
  Level level_;
  Chains chains_;
  CallTree tree_;
  std::vector<PlannedCall> calls_;
  std::vector<PlannedMismatch> mismatches_;
  std::vector<std::shared_ptr<const float[]>> log_probs_;
};

enum DropReason : uint8_t {
  kAborted,
  kExcluded,
  kEmpty,
  kOverlongPrompt,
  kTruncatedRollout,
  kOverlongCall,
  kNumDropReasons
};

// A rollout's sampled tokens by what became of them, and what else is counted.
struct RolloutCounts {
  int64_t sampled = 0;
  int64_t trained = 0;
  int64_t truncated = 0;
  int64_t duplicate = 0;
  std::array<int64_t, kNumDropReasons> dropped{};
  int64_t empty_calls = 0;
  int64_t empty_rows = 0;
  int64_t rows = 0;
  int64_t chains = 0;
  int64_t cut_chains = 0;    // chains whose response was longer than its limit
  bool lost_tokens = false;  // sampled tokens were lost to a limit
  int64_t clashes = 0;       // calls with an earlier call's response_id, but other ids
};

// Counts the calls that are not laid out.
RolloutCounts count_calls(const RolloutPlan& plan);

using Plans = std::vector<std::shared_ptr<const RolloutPlan>>;

// The rows of a batch. They point into the plans they were made from, or at `tokens`.
struct RowSet {
  Plans plans;
  std::vector<Row> rows;
  std::vector<Segment> segments;
  std::vector<Jump> jumps;
  Tokens tokens;                       // of trees, row by row
  std::vector<int32_t> rollout;        // per row
  std::vector<int32_t> first_call;     // per row
  std::vector<uint8_t> marked;         // per row: counts in its group, not in the update
  std::vector<uint8_t> has_log_probs;  // per row: known for every sampled token
  std::vector<RolloutCounts> counts;   // per rollout
  bool any_log_probs = false;
  int64_t position_dims = 0;  // of calls that have position ids; 0: none has
  Widths longest{0, 0};
  int64_t prompt_tokens = 0;
  int64_t response_tokens = 0;
};

// Cuts every chain to the limits, or lays the trees out depth first in rows of at most
// `options.tree` tokens, where a longer call is dropped. All plans are at `options.level`.
// `rewards`: one per rollout.
RowSet make_rows(Plans plans, const float* rewards, const RowOptions& options);

// make_rows at level tree.
RowSet make_tree_rows(Plans plans, const float* rewards, int64_t max_tokens);

}  // namespace agl
