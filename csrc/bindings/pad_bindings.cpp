#include "bindings/pad_bindings.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/flat_arguments.h"
#include "bindings/python_tokens.h"
#include "core/pad.h"
#include "core/parallel.h"
#include "core/parse.h"
#include "core/stores.h"

namespace agl::bindings {
namespace {

bool is_one_sequence(py::handle ids) {
  if (!PyList_Check(ids.ptr()) && !PyTuple_Check(ids.ptr())) return true;
  const auto items = py::reinterpret_borrow<py::sequence>(ids);
  if (items.empty()) return true;
  const py::object first = items[0];
  return !(PyList_Check(first.ptr()) || PyTuple_Check(first.ptr()) ||
           py::isinstance<py::array>(first) || py::hasattr(first, "detach"));
}

// One sequence of token ids or a batch of them, as given by the caller.
class Sequences {
 public:
  explicit Sequences(py::object ids) : single_(is_one_sequence(ids)), given_(std::move(ids)) {
    if (single_) {
      rows_.emplace_back(given_, Where{"ids"});
    } else {
      const auto items =
          py::reinterpret_steal<py::object>(PySequence_Fast(given_.ptr(), "ids must be a batch"));
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
        rows_.emplace_back(PySequence_Fast_GET_ITEM(items.ptr(), i), Where{"ids", {}, -1, i});
      }
    }
    for (const PythonTokens& row : rows_) longest_ = std::max(longest_, row.size());
  }

  bool single() const { return single_; }
  std::size_t count() const { return rows_.size(); }
  int64_t longest() const { return longest_; }

  // Writes (count, width) ids and mask. Threads read the lists while this one holds the GIL.
  void pad(int64_t width, int64_t pad_token_id, bool left, std::uintptr_t ids,
           std::uintptr_t mask) const {
    const auto rows = static_cast<int64_t>(rows_.size());
    const int64_t bytes = 2 * rows * width * int64_t{sizeof(int64_t)};
    const bool streaming = bytes >= kStreamingBytes;
    const Side side = left ? Side::kLeft : Side::kRight;
    std::atomic<int64_t> bad_row{-1};
    parallel_slices(rows, threads_for(bytes), [&](int64_t begin, int64_t end) {
      std::vector<int32_t> scratch(static_cast<std::size_t>(width));
      for (int64_t i = begin; i < end; ++i) {
        const PythonTokens& row = rows_[static_cast<std::size_t>(i)];
        const int64_t kept = std::min(row.size(), width);
        const int64_t first = left ? row.size() - kept : 0;
        if (!row.try_copy(first, first + kept, scratch.data())) {
          bad_row = i;
          break;
        }
        pad_row(scratch.data(), kept, width, pad_token_id, side, streaming,
                address<int64_t>(ids) + i * width, address<int64_t>(mask) + i * width);
      }
      pad_finish();
    });
    if (bad_row >= 0) pad_slowly(width, pad_token_id, side, ids, mask);
  }

  // Checks the ids that padding to `width` leaves out.
  void check_rest(int64_t width, bool left) const {
    std::vector<int32_t> scratch;
    for (const PythonTokens& row : rows_) {
      const int64_t over = row.size() - width;
      if (over <= 0) continue;
      scratch.resize(static_cast<std::size_t>(over));
      const int64_t first = left ? 0 : width;
      row.copy(first, first + over, scratch.data());
    }
  }

  // What padding to `width` keeps: int32 values end to end and int64 offsets, (sum of kept
  // lengths,) and (count + 1,).
  py::tuple ragged(int64_t width, bool left) const {
    std::vector<int64_t> offsets{0};
    for (const PythonTokens& row : rows_) {
      offsets.push_back(offsets.back() + std::min(row.size(), width));
    }
    py::array_t<int32_t> values(offsets.back());
    int32_t* out = values.mutable_data();
    for (const PythonTokens& row : rows_) {
      const int64_t kept = std::min(row.size(), width);
      const int64_t first = left ? row.size() - kept : 0;
      row.copy(first, first + kept, out);
      out += kept;
    }
    return py::make_tuple(
        values, py::array_t<int64_t>(static_cast<py::ssize_t>(offsets.size()), offsets.data()));
  }

 private:
  // For ids that need Python to be read, or are bad: then this says which.
  void pad_slowly(int64_t width, int64_t pad_token_id, Side side, std::uintptr_t ids,
                  std::uintptr_t mask) const {
    std::vector<int32_t> scratch;
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      scratch.resize(static_cast<std::size_t>(rows_[i].size()));
      rows_[i].copy(0, rows_[i].size(), scratch.data());
      const auto at = static_cast<int64_t>(i) * width;
      pad_row(scratch.data(), rows_[i].size(), width, pad_token_id, side, false,
              address<int64_t>(ids) + at, address<int64_t>(mask) + at);
    }
  }

  bool single_;
  py::object given_;
  std::deque<PythonTokens> rows_;
  int64_t longest_ = 0;
};

// A new list of `count` references to one object, and then room for `more`.
void put(PyObject** at, Py_ssize_t count, PyObject* object) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    Py_INCREF(object);
    at[i] = object;
  }
}

// List to list, as Agent-lightning's functions: ([pad..., ids...], [0..., 1...]) or the mirror
// image.
py::tuple pad_list(py::handle ids, Py_ssize_t max_length, py::handle pad_token_id, bool left) {
  if (!PyList_Check(ids.ptr()) && !PyTuple_Check(ids.ptr())) {
    throw py::type_error("ids must be a list or tuple, got " + std::string(py::repr(ids)) + " (" +
                         Py_TYPE(ids.ptr())->tp_name + ")");
  }
  if (max_length < 0) {
    throw py::value_error("max_length must be at least 0, got " + std::to_string(max_length));
  }
  PyObject* const* items = PySequence_Fast_ITEMS(ids.ptr());
  const Py_ssize_t length = PySequence_Fast_GET_SIZE(ids.ptr());
  const Py_ssize_t kept = std::min(length, max_length);
  const Py_ssize_t gap = max_length - kept;
  const Py_ssize_t first_gap = left ? 0 : kept;
  const Py_ssize_t first_kept = left ? gap : 0;

  const auto padded = py::reinterpret_steal<py::object>(PyList_New(max_length));
  const auto mask = py::reinterpret_steal<py::object>(PyList_New(max_length));
  if (!padded || !mask) throw py::error_already_set();
  PyObject** const padded_items = reinterpret_cast<PyListObject*>(padded.ptr())->ob_item;
  PyObject** const mask_items = reinterpret_cast<PyListObject*>(mask.ptr())->ob_item;
  const py::int_ zero(0);
  const py::int_ one(1);
  put(padded_items + first_gap, gap, pad_token_id.ptr());
  put(mask_items + first_gap, gap, zero.ptr());
  put(mask_items + first_kept, kept, one.ptr());
  items += left ? length - kept : 0;
  for (Py_ssize_t i = 0; i < kept; ++i) {
    Py_INCREF(items[i]);
    padded_items[first_kept + i] = items[i];
  }
  return py::make_tuple(padded, mask);
}

py::array_t<int32_t> parse(py::handle text) {
  const char* data = nullptr;
  Py_ssize_t length = 0;
  if (PyUnicode_Check(text.ptr())) {
    data = PyUnicode_AsUTF8AndSize(text.ptr(), &length);
    if (!data) throw py::error_already_set();
  } else if (PyBytes_Check(text.ptr())) {
    data = PyBytes_AS_STRING(text.ptr());
    length = PyBytes_GET_SIZE(text.ptr());
  } else {
    throw py::type_error("token ids must be str or bytes, got " +
                         std::string(Py_TYPE(text.ptr())->tp_name));
  }
  const std::unique_ptr<int32_t[]> ids(
      new int32_t[static_cast<std::size_t>(max_token_ids(length))]);
  int64_t count = 0;
  {
    // To get the lock back may take longer than to read a short text.
    constexpr Py_ssize_t kLong = 1 << 20;
    std::optional<py::gil_scoped_release> release;
    if (length > kLong) release.emplace();
    count = parse_token_ids(data, length, ids.get());
  }
  return py::array_t<int32_t>(count, ids.get());
}

}  // namespace

void bind_pad(py::module_& m) {
  py::class_<Sequences>(m, "Sequences")
      .def(py::init<py::object>(), py::arg("ids"))
      .def_property_readonly("single", &Sequences::single)
      .def_property_readonly("longest", &Sequences::longest)
      .def("__len__", &Sequences::count)
      .def("pad", &Sequences::pad, py::arg("width"), py::arg("pad_token_id"), py::kw_only(),
           py::arg("left"), py::arg("ids"), py::arg("mask"))
      .def("check_rest", &Sequences::check_rest, py::arg("width"), py::kw_only(), py::arg("left"))
      .def("ragged", &Sequences::ragged, py::arg("width"), py::kw_only(), py::arg("left"));
  m.def("pad_list", &pad_list, py::arg("ids"), py::arg("max_length"), py::arg("pad_token_id"),
        py::kw_only(), py::arg("left"));
  m.def("parse_token_ids", &parse, py::arg("text"));
}

}  // namespace agl::bindings
