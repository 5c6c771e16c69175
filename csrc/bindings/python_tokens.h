#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/token_reader.h"

namespace agl::bindings {

namespace py = pybind11;

// Names a sequence in an error: "rollout 'r1', call 3: prompt_ids", "ids[2]" or "ids".
struct Where {
  const char* field;
  py::handle rollout_id{};
  int64_t call = -1;
  int64_t row = -1;

  std::string text() const;
};

// Thrown where an id cannot be read, or refused, without a call into Python.
struct NeedsPython {};

// While it lives, reading ids on this thread makes no call into Python but throws NeedsPython. So
// threads may read Python's lists while another one holds the GIL for all of them.
class WithoutPython {
 public:
  WithoutPython();
  ~WithoutPython();
  WithoutPython(const WithoutPython&) = delete;
  WithoutPython& operator=(const WithoutPython&) = delete;
};

// A caller's sequence of token ids, read where it lies: a list or tuple of int, a 1-D int32 or
// int64 numpy array, or a torch tensor of that kind. Every id is checked when it is read.
class PythonTokens final : public TokenReader {
 public:
  PythonTokens(py::handle sequence, const Where& where);

  int64_t size() const override { return size_; }
  int32_t at(int64_t index) const override;
  void copy(int64_t begin, int64_t end, int32_t* out) const override;
  int64_t first_difference(int64_t begin, int64_t end, const int32_t* known,
                           const Echo& echo) const override;

  // All of them.
  std::vector<int32_t> ids() const;

  // As copy(0, size()), with no Python call, so that any thread may do it while the caller holds
  // the GIL. False when an id needs the slow path, or is bad: then copy() says which.
  bool try_copy(int64_t begin, int64_t end, int32_t* out) const noexcept;

 private:
  enum class Kind : uint8_t { kObjects, kInt32, kInt64 };

  void read_array(py::array array, py::handle given);
  int64_t shared_with(const PythonTokens& other, int64_t begin, int64_t end, int64_t offset) const;
  int64_t same_values(int64_t begin, int64_t end, const int32_t* known) const;
  int32_t read_object(int64_t index) const;
  [[noreturn]] void refuse(int64_t index, const std::string& value) const;

  Kind kind_ = Kind::kObjects;
  const void* data_ = nullptr;  // PyObject* const*, const int32_t* or const int64_t*
  int64_t size_ = 0;
  Where where_;
  py::object owner_;  // keeps data_ alive, whatever becomes of the caller's object
};

}  // namespace agl::bindings
