#pragma once

#include <cstdint>

namespace agl {

// A run of a row's response tokens that came from one place. Runs lie end to end.
struct Segment {
  int32_t end;             // index in the response just past the run's last token
  int32_t call;            // the call that sampled the run, -1 for context (mask 0)
  const float* log_probs;  // one per token of the run, or null where unknown
};

// Where a row's positions do not go on by one: the response token at `index` is at `depth`.
struct Jump {
  int32_t index;
  int32_t depth;
};

// One training row, cut to its limits. Borrows everything it points at.
struct Row {
  const int32_t* prompt;
  const int32_t* response;
  const Segment* segments;            // cover the response exactly
  const Jump* jumps;                  // by index; the row counts up from 0 to the first
  const int32_t* prompt_positions;    // in dimension 0; null: the row counts up from 0 in all
  const int32_t* response_positions;  // in dimension 0
  int64_t position_stride;            // from a dimension to the next
  int32_t prompt_length;
  int32_t response_length;
  int32_t num_segments;
  int32_t num_jumps;
  float score;  // the reward; it stands on the last response token
};

// B rows, P prompt width, R response width, T = P + R.
struct Widths {
  int64_t prompt;    // P
  int64_t response;  // R

  int64_t total() const { return prompt + response; }
};

// Where the padded tensors go; row-major, caller-owned, host or device memory. D: dimensions of
// positions; where there is one, position_ids is (B, T) as well.
struct PaddedOutput {
  int64_t* prompts;         // (B, P)
  int64_t* responses;       // (B, R)
  int64_t* input_ids;       // (B, T)
  int64_t* attention_mask;  // (B, T)
  int64_t* position_ids;    // (B, D, T)
  int64_t* response_mask;   // (B, R)
  int64_t* call_index;      // (B, R), or null when not asked for
  float* scores;            // (B, R)
  float* log_probs;         // (B, R), or null when no row has any
  int64_t position_dims;    // D
};

// Where the jagged values go: rows end to end, no padding.
struct JaggedOutput {
  int64_t* prompts;        // (sum of prompt lengths,)
  int64_t* responses;      // (sum of response lengths,)
  int64_t* input_ids;      // (sum of both,)
  int64_t* position_ids;   // like input_ids, in each of D dimensions
  int64_t* response_mask;  // like responses
  int64_t* call_index;     // like responses, or null
  float* scores;           // like responses
  float* log_probs;        // like responses, or null
  int64_t position_dims;   // D
};

}  // namespace agl
