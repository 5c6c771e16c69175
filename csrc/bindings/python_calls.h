#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "bindings/python_tokens.h"
#include "core/rollout_plan.h"

namespace agl::bindings {

// A Call object, read by attribute and checked.
struct PythonCall {
  PythonTokens prompt;
  PythonTokens response;
  std::shared_ptr<const float[]> log_probs;  // one per response token, or null
  TokenPositions positions;                  // of the whole prompt and the response
  py::object response_id;                    // None where it has none
  bool trainable;
  bool aborted;
  bool clashes = false;  // an earlier call of the rollout has its response_id, but other ids
  CallClass call_class = CallClass::kLaidOut;

  // `keep`: how many tokens of the prompt stand before prompt_ids.
  PythonCall(py::handle call, py::handle rollout_id, int64_t index, int64_t keep = 0);

  // Sets the class. `prompt_length`: of the whole prompt, also where `prompt` is only its tail.
  void classify(bool duplicate, int64_t prompt_length);

  // Checks the ids of a call that is not laid out; the others are checked as they are copied.
  void check_ids() const;

  // Whether prompt and response hold the same ids. Checks them.
  bool same_ids(const PythonCall& other) const;
};

// The response_ids of a rollout's calls, in the order of the calls.
class SeenResponseIds {
 public:
  // The last call with this response_id, -1 for none.
  int64_t last(const py::object& response_id) const;
  // The call before `call` with the same response_id, -1 for none.
  int64_t before(int64_t call) const { return before_[static_cast<std::size_t>(call)]; }
  // Adds the next call.
  void add(const py::object& response_id);

 private:
  py::dict last_;
  std::vector<int64_t> before_;
};

}  // namespace agl::bindings
