#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/expand.h"
#include "core/pad_at.h"

namespace agl::bindings {

// Memory comes as an integer (Tensor.data_ptr()), so that no torch is linked.
template <typename T>
T* address(std::uintptr_t value) {
  return reinterpret_cast<T*>(value);
}

// FlatRows.counts: rows, segments, log-probs, tokens, dimensions of positions.
using Counts = std::array<int64_t, 5>;

inline FlatCounts flat_counts(const Counts& counts) {
  return {counts[0], counts[1], counts[2], counts[3], counts[4]};
}

// `outputs` maps tensor names to addresses. `position_dims`: of the rows, 0 where they count up.
inline PaddedOutput padded_output(const pybind11::dict& outputs, int64_t position_dims) {
  const auto required = [&](const char* name) { return outputs[name].cast<std::uintptr_t>(); };
  const auto optional = [&](const char* name) {
    return outputs.contains(name) ? required(name) : 0;
  };
  PaddedOutput out;
  out.prompts = address<int64_t>(required("prompts"));
  out.responses = address<int64_t>(required("responses"));
  out.input_ids = address<int64_t>(required("input_ids"));
  out.attention_mask = address<int64_t>(required("attention_mask"));
  out.position_ids = address<int64_t>(required("position_ids"));
  out.response_mask = address<int64_t>(required("response_mask"));
  out.call_index = address<int64_t>(optional("call_index"));
  out.scores = address<float>(required("token_level_scores"));
  out.log_probs = address<float>(optional("rollout_log_probs"));
  out.position_dims = std::max<int64_t>(position_dims, 1);
  return out;
}

inline Expand expand_arguments(std::uintptr_t flat, const Counts& counts, int64_t prompt_width,
                               int64_t response_width, int64_t pad_token_id,
                               const pybind11::dict& outputs) {
  return {flat_view(address<const void>(flat), flat_counts(counts)),
          {prompt_width, response_width},
          pad_token_id,
          padded_output(outputs, counts[4])};
}

inline PadAt pad_arguments(std::uintptr_t values, std::uintptr_t offsets, int64_t width,
                           int64_t pad_token_id, bool left, std::uintptr_t ids,
                           std::uintptr_t mask) {
  return {address<const int32_t>(values),
          address<const int64_t>(offsets),
          width,
          pad_token_id,
          left ? Side::kLeft : Side::kRight,
          address<int64_t>(ids),
          address<int64_t>(mask)};
}

}  // namespace agl::bindings
