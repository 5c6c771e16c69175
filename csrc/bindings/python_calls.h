#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/python_tokens.h"
#include "core/rollout_plan.h"

namespace agl::bindings {

// A Call object, read by attribute and checked.
struct PythonCall {
  PythonTokens prompt;
  PythonTokens response;
  std::shared_ptr<const float[]> log_probs;  // one per response token, or null
  CallClass call_class;

  // `seen` holds the response_ids of the rollout's earlier calls; this call's is added on commit.
  PythonCall(py::handle call, py::handle rollout_id, int64_t index, const py::set& seen);

  // Checks the ids of a call that is not laid out; the others are checked as they are copied.
  void check_ids() const;

  py::object response_id;
};

}  // namespace agl::bindings
