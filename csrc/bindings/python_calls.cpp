#include "bindings/python_calls.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace agl::bindings {
namespace {

// The values of a 1-D float array or tensor.
py::object list_of_floats(py::object values, const Where& where) {
  if (py::hasattr(values, "detach")) {
    values = values.attr("detach")().attr("cpu")().attr("double")().attr("numpy")();
  }
  if (!py::isinstance<py::array>(values)) {
    throw py::type_error(where.text() +
                         " must be a list or tuple of float, a 1-D float array or tensor, or "
                         "None, got " +
                         std::string(py::repr(values)) + " (" + Py_TYPE(values.ptr())->tp_name +
                         ")");
  }
  const auto array = py::reinterpret_borrow<py::array>(values);
  if (array.dtype().kind() != 'f' || array.ndim() != 1) {
    throw py::type_error(where.text() + " must be a 1-D array of floats, got a " +
                         std::string(py::str(array.dtype())) + " array of shape " +
                         std::string(py::str(array.attr("shape"))));
  }
  return array.attr("tolist")();
}

std::shared_ptr<const float[]> read_log_probs(py::handle given, int64_t expected,
                                              const Where& where) {
  if (given.is_none()) return nullptr;
  py::object values = py::reinterpret_borrow<py::object>(given);
  if (!PyList_Check(given.ptr()) && !PyTuple_Check(given.ptr())) {
    values = list_of_floats(values, where);
  }
  const auto items = py::reinterpret_steal<py::object>(PySequence_Fast(values.ptr(), ""));
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(items.ptr());
  if (count != expected) {
    throw py::value_error(where.text() + " has " + std::to_string(count) +
                          " entries, but response_ids has " + std::to_string(expected));
  }
  std::shared_ptr<float[]> out(new float[static_cast<std::size_t>(count)]);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(items.ptr(), i);
    const double value = PyBool_Check(item) ? -1.0 : PyFloat_AsDouble(item);
    if (PyBool_Check(item) || (value == -1.0 && PyErr_Occurred())) {
      PyErr_Clear();
      throw py::type_error(where.text() + "[" + std::to_string(i) + "] is " +
                           std::string(py::repr(item)) + "; log-probs must be float");
    }
    const auto single = static_cast<float>(value);
    if (!std::isfinite(single)) {
      throw py::value_error(where.text() + "[" + std::to_string(i) + "] is " +
                            std::string(py::repr(item)) + "; log-probs must be finite");
    }
    out[static_cast<std::size_t>(i)] = single;
  }
  return out;
}

template <typename T>
std::shared_ptr<const int32_t[]> checked_positions(const py::array& given, const Where& where) {
  const auto array = given.cast<py::array_t<T, py::array::c_style | py::array::forcecast>>();
  const T* values = array.data();
  std::shared_ptr<int32_t[]> out(new int32_t[static_cast<std::size_t>(array.size())]);
  for (py::ssize_t i = 0; i < array.size(); ++i) {
    if (values[i] < 0 || values[i] > std::numeric_limits<int32_t>::max()) {
      throw py::value_error(where.text() + "[" + std::to_string(i / array.shape(1)) + ", " +
                            std::to_string(i % array.shape(1)) + "] is " +
                            std::to_string(values[i]) + "; positions must be from 0 to 2147483647");
    }
    out[static_cast<std::size_t>(i)] = static_cast<int32_t>(values[i]);
  }
  return out;
}

TokenPositions read_positions(py::object given, int64_t tokens, const Where& where) {
  if (given.is_none()) return {};
  if (py::hasattr(given, "detach")) {
    given = given.attr("detach")().attr("cpu")().attr("numpy")();
  }
  const std::string expected = " must be an int64 array or tensor of shape (dimensions, " +
                               std::to_string(tokens) + "), one column per token, got ";
  if (!py::isinstance<py::array>(given)) {
    throw py::type_error(where.text() + expected + std::string(py::repr(given)));
  }
  const auto array = py::reinterpret_borrow<py::array>(given);
  const py::dtype dtype = array.dtype();
  if (dtype.kind() != 'i' || (dtype.itemsize() != 4 && dtype.itemsize() != 8)) {
    throw py::type_error(where.text() + expected + "dtype " + std::string(py::str(dtype)));
  }
  if (array.ndim() != 2 || array.shape(0) == 0 || array.shape(1) != tokens) {
    throw py::value_error(where.text() + expected + "shape " +
                          std::string(py::str(array.attr("shape"))));
  }
  return {array.shape(0), tokens,
          dtype.itemsize() == 4 ? checked_positions<int32_t>(array, where)
                                : checked_positions<int64_t>(array, where)};
}

bool is_abort(py::handle finish_reason) {
  return PyUnicode_Check(finish_reason.ptr()) &&
         PyUnicode_CompareWithASCIIString(finish_reason.ptr(), "abort") == 0;
}

// None where the call has none; "" is none, too.
py::object read_response_id(py::object given, const Where& where) {
  if (given.is_none() || PyLong_Check(given.ptr())) return given;
  if (!PyUnicode_Check(given.ptr())) {
    throw py::type_error(where.text() + " must be a str or None, got " +
                         std::string(py::repr(given)));
  }
  return PyUnicode_GET_LENGTH(given.ptr()) == 0 ? py::none() : given;
}

bool read_trainable(const py::object& given, const Where& where) {
  if (!PyBool_Check(given.ptr())) {
    throw py::type_error(where.text() + " must be True or False, got " +
                         std::string(py::repr(given)));
  }
  return given.ptr() == Py_True;
}

}  // namespace

PythonCall::PythonCall(py::handle call, py::handle rollout_id, int64_t index, int64_t keep)
    : prompt(call.attr("prompt_ids"), {"prompt_ids", rollout_id, index}),
      response(call.attr("response_ids"), {"response_ids", rollout_id, index}),
      log_probs(read_log_probs(call.attr("log_probs"), response.size(),
                               {"log_probs", rollout_id, index})),
      positions(read_positions(py::getattr(call, "position_ids", py::none()),
                               keep + prompt.size() + response.size(),
                               {"position_ids", rollout_id, index})),
      response_id(read_response_id(call.attr("response_id"), {"response_id", rollout_id, index})),
      trainable(read_trainable(call.attr("trainable"), {"trainable", rollout_id, index})),
      aborted(is_abort(call.attr("finish_reason"))) {}

void PythonCall::classify(bool duplicate, int64_t prompt_length) {
  const bool empty = prompt_length == 0 || response.size() == 0;
  call_class = duplicate    ? CallClass::kDuplicate
               : aborted    ? CallClass::kAborted
               : !trainable ? CallClass::kExcluded
               : empty      ? CallClass::kEmpty
                            : CallClass::kLaidOut;
}

void PythonCall::check_ids() const {
  std::vector<int32_t> scratch(static_cast<std::size_t>(std::max(prompt.size(), response.size())));
  prompt.copy(0, prompt.size(), scratch.data());
  response.copy(0, response.size(), scratch.data());
}

bool PythonCall::same_ids(const PythonCall& other) const {
  return prompt.size() == other.prompt.size() && response.size() == other.response.size() &&
         response.ids() == other.response.ids() && prompt.ids() == other.prompt.ids();
}

int64_t SeenResponseIds::last(const py::object& response_id) const {
  if (response_id.is_none() || !last_.contains(response_id)) return -1;
  return last_[response_id].cast<int64_t>();
}

void SeenResponseIds::add(const py::object& response_id) {
  before_.push_back(last(response_id));
  if (!response_id.is_none()) last_[response_id] = before_.size() - 1;
}

}  // namespace agl::bindings
