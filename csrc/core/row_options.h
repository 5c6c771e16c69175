#pragma once

#include <cstdint>

namespace agl {

enum class Level : uint8_t { kTransition, kTrajectory, kTree };

// How calls become rows: agl_fast.rows.options, checked there.
struct RowOptions {
  Level level;
  int64_t prompt;       // P, the most tokens of a row's prompt
  int64_t response;     // R, of its response
  int64_t total;        // of both; 0: no such limit
  int64_t tree;         // of a row at level tree
  bool drop_overlong;   // mark rows of longer prompts; else move what is past P to the response
  bool mask_truncated;  // mark the rows of rollouts that lost sampled tokens to a limit
  bool zero_truncated;  // give such rollouts reward 0
};

}  // namespace agl
