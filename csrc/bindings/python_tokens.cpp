#include "bindings/python_tokens.h"

#include <cstring>
#include <limits>

namespace agl::bindings {
namespace {

constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();

thread_local bool t_without_python = false;

// Reads a token id out of an exact int without a call. False for anything else, also for ints that
// are negative or too large.
inline bool read_plain(PyObject* object, int32_t& id) noexcept {
  if (Py_TYPE(object) != &PyLong_Type) return false;
  const auto* number = reinterpret_cast<const PyLongObject*>(object);
#if PY_VERSION_HEX >= 0x030C0000
  constexpr int kDigits = 3;  // bits below the digit count: sign and flags
  const uintptr_t tag = number->long_value.lv_tag;
  const digit* digits = number->long_value.ob_digit;
  const uintptr_t count = tag >> kDigits;
  const bool negative = (tag & 3U) == 2U;
  if (negative) return false;
#else
  const Py_ssize_t count = Py_SIZE(object);
  const digit* digits = number->ob_digit;
#endif
  if (count == 1) {
    id = static_cast<int32_t>(digits[0]);
    return true;
  }
  if (count == 0) {
    id = 0;
    return true;
  }
  if (count == 2 && digits[1] < 2) {
    id = static_cast<int32_t>(digits[0] | digits[1] << PyLong_SHIFT);
    return true;
  }
  return false;
}

std::string repr_of(py::handle object) { return py::repr(object).cast<std::string>(); }

const char* type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

bool is_tensor(py::handle object) {
  return py::hasattr(object, "detach") && py::hasattr(object, "numpy");
}

}  // namespace

WithoutPython::WithoutPython() { t_without_python = true; }
WithoutPython::~WithoutPython() { t_without_python = false; }

std::string Where::text() const {
  std::string out;
  if (rollout_id) out = "rollout " + repr_of(rollout_id) + ", ";
  if (call >= 0) out += "call " + std::to_string(call) + ": ";
  out += field;
  if (row >= 0) out += "[" + std::to_string(row) + "]";
  return out;
}

PythonTokens::PythonTokens(py::handle sequence, const Where& where) : where_(where) {
  PyObject* object = sequence.ptr();
  if (PyList_Check(object)) {
    data_ = reinterpret_cast<PyListObject*>(object)->ob_item;
    size_ = PyList_GET_SIZE(object);
    owner_ = py::reinterpret_borrow<py::object>(sequence);
  } else if (PyTuple_Check(object)) {
    data_ = reinterpret_cast<PyTupleObject*>(object)->ob_item;
    size_ = PyTuple_GET_SIZE(object);
    owner_ = py::reinterpret_borrow<py::object>(sequence);
  } else if (py::isinstance<py::array>(sequence)) {
    read_array(py::reinterpret_borrow<py::array>(sequence), sequence);
  } else if (is_tensor(sequence)) {
    const py::object dtype = sequence.attr("dtype");
    if (const std::string name = py::str(dtype); name != "torch.int64" && name != "torch.int32") {
      throw py::type_error(where_.text() + " must hold int32 or int64 ids, got a " + name +
                           " tensor");
    }
    read_array(sequence.attr("detach")().attr("cpu")().attr("numpy")(), sequence);
  } else {
    throw py::type_error(where_.text() +
                         " must be a list or tuple of int, or a 1-D int32 or int64 numpy array or "
                         "torch tensor, got " +
                         repr_of(sequence) + " (" + type_name(sequence) + ")");
  }
}

void PythonTokens::read_array(py::array array, py::handle given) {
  const py::dtype dtype = array.dtype();
  const bool native = dtype.byteorder() == '=' || dtype.byteorder() == '|';
  if (dtype.kind() != 'i' || !native || (dtype.itemsize() != 4 && dtype.itemsize() != 8)) {
    throw py::type_error(where_.text() + " must hold int32 or int64 ids, got a " +
                         std::string(py::str(dtype)) + " array");
  }
  if (array.ndim() != 1) {
    throw py::value_error(where_.text() + " must be 1-D, got shape " +
                          repr_of(given.attr("shape")));
  }
  const bool aligned = (array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) != 0;
  if (!aligned || (array.size() > 1 && array.strides(0) != dtype.itemsize())) {
    array = array.attr("copy")();
  }
  kind_ = dtype.itemsize() == 4 ? Kind::kInt32 : Kind::kInt64;
  data_ = array.data();
  size_ = array.size();
  owner_ = std::move(array);
}

int32_t PythonTokens::at(int64_t index) const {
  int32_t id = 0;
  copy(index, index + 1, &id);
  return id;
}

bool PythonTokens::try_copy(int64_t begin, int64_t end, int32_t* out) const noexcept {
  switch (kind_) {
    case Kind::kObjects: {
      auto* const* items = static_cast<PyObject* const*>(data_);
      for (int64_t i = begin; i < end; ++i) {
        if (!read_plain(items[i], *out++)) return false;
      }
      return true;
    }
    case Kind::kInt32: {
      const auto* ids = static_cast<const int32_t*>(data_);
      int32_t all = 0;
      for (int64_t i = begin; i < end; ++i) all |= * out++ = ids[i];
      return all >= 0;
    }
    case Kind::kInt64: {
      const auto* ids = static_cast<const int64_t*>(data_);
      uint64_t all = 0;
      for (int64_t i = begin; i < end; ++i) {
        all |= static_cast<uint64_t>(ids[i]);
        *out++ = static_cast<int32_t>(ids[i]);
      }
      return all <= static_cast<uint64_t>(kMaxId);
    }
  }
  return false;
}

void PythonTokens::copy(int64_t begin, int64_t end, int32_t* out) const {
  if (try_copy(begin, end, out)) return;
  if (t_without_python) throw NeedsPython();
  for (int64_t i = begin; i < end; ++i) {
    if (kind_ == Kind::kObjects) {
      *out++ = read_object(i);
      continue;
    }
    const int64_t id = kind_ == Kind::kInt32 ? static_cast<const int32_t*>(data_)[i]
                                             : static_cast<const int64_t*>(data_)[i];
    if (id < 0 || id > kMaxId) refuse(i, std::to_string(id));
    *out++ = static_cast<int32_t>(id);
  }
}

std::vector<int32_t> PythonTokens::ids() const {
  std::vector<int32_t> out(static_cast<std::size_t>(size_));
  copy(0, size_, out.data());
  return out;
}

int32_t PythonTokens::read_object(int64_t index) const {
  PyObject* object = static_cast<PyObject* const*>(data_)[index];
  int32_t id = 0;
  if (read_plain(object, id)) return id;
  if (PyBool_Check(object) || !PyIndex_Check(object)) {
    throw py::type_error(where_.text() + "[" + std::to_string(index) + "] is " + repr_of(object) +
                         " (" + type_name(object) + "); token ids must be int");
  }
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(object));
  if (!number) throw py::error_already_set();
  if (!read_plain(number.ptr(), id)) refuse(index, repr_of(number));
  return id;
}

void PythonTokens::refuse(int64_t index, const std::string& value) const {
  throw py::value_error(where_.text() + "[" + std::to_string(index) + "] is " + value +
                        "; token ids must be from 0 to " + std::to_string(kMaxId));
}

int64_t PythonTokens::first_difference(int64_t begin, int64_t end, const int32_t* known,
                                       const Echo& echo) const {
  const auto* prompt = static_cast<const PythonTokens*>(echo.prompt);
  const auto* response = static_cast<const PythonTokens*>(echo.response);
  while (begin < end) {
    if (prompt) {
      begin = shared_with(*prompt, begin, end, 0);
      if (response) begin = shared_with(*response, begin, end, prompt->size());
    }
    if (begin == end) break;
    constexpr int64_t kBlock = 256;  // then look for shared tokens again
    const int64_t block_end = std::min(begin + kBlock, end);
    begin = same_values(begin, block_end, known);
    if (begin < block_end) break;
  }
  return begin;
}

// The first index in [begin, end) that is not the same object, or memory, as the other's at
// index - offset.
int64_t PythonTokens::shared_with(const PythonTokens& other, int64_t begin, int64_t end,
                                  int64_t offset) const {
  if (kind_ != other.kind_ || begin < offset) return begin;
  end = std::min(end, offset + other.size_);
  if (kind_ == Kind::kObjects) {
    auto* const* mine = static_cast<PyObject* const*>(data_);
    auto* const* theirs = static_cast<PyObject* const*>(other.data_);
    constexpr int64_t kBlock = 64;
    while (begin + kBlock <= end &&
           std::memcmp(mine + begin, theirs + (begin - offset), kBlock * sizeof(PyObject*)) == 0) {
      begin += kBlock;
    }
    while (begin < end && mine[begin] == theirs[begin - offset]) ++begin;
    return begin;
  }
  const int64_t item = kind_ == Kind::kInt32 ? 4 : 8;
  const bool same_memory =
      static_cast<const char*>(data_) + offset * item == static_cast<const char*>(other.data_);
  return same_memory ? std::max(begin, end) : begin;
}

int64_t PythonTokens::same_values(int64_t begin, int64_t end, const int32_t* known) const {
  switch (kind_) {
    case Kind::kObjects: {
      auto* const* items = static_cast<PyObject* const*>(data_);
      for (int32_t id = 0; begin < end; ++begin) {
        if (read_plain(items[begin], id) ? id != known[begin] : at(begin) != known[begin]) break;
      }
      return begin;
    }
    case Kind::kInt32:
      return agl::first_difference(static_cast<const int32_t*>(data_), known, begin, end);
    case Kind::kInt64: {
      const auto* ids = static_cast<const int64_t*>(data_);
      while (begin < end && ids[begin] == known[begin]) ++begin;
      return begin;
    }
  }
  return begin;
}

}  // namespace agl::bindings
