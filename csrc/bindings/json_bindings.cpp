#include "bindings/json_bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstring>
#include <string>
#include <vector>

#include "core/json.h"

namespace agl::bindings {
namespace {

namespace py = pybind11;

// Rows of int64 fields.
template <typename Row>
py::array_t<int64_t> table_of(const std::vector<Row>& rows) {
  constexpr py::ssize_t kColumns = sizeof(Row) / sizeof(int64_t);
  py::array_t<int64_t> table({static_cast<py::ssize_t>(rows.size()), kColumns});
  if (!rows.empty()) std::memcpy(table.mutable_data(), rows.data(), rows.size() * sizeof(Row));
  return table;
}

JsonConstants constants_of(bool allowed) {
  return allowed ? JsonConstants::kAllowed : JsonConstants::kRefused;
}

const char* checked(const py::bytes& text, int64_t begin, int64_t end) {
  const int64_t length = PyBytes_GET_SIZE(text.ptr());
  if (begin < 0 || begin > end || end > length) {
    throw py::value_error("begin " + std::to_string(begin) + " and end " + std::to_string(end) +
                          " are no slice of " + std::to_string(length) + " bytes");
  }
  return PyBytes_AS_STRING(text.ptr());
}

// Bytes do not change, so that other threads may run while they are read.
py::array_t<int64_t> members(const py::bytes& text, int64_t begin, int64_t end, bool constants) {
  const char* const data = checked(text, begin, end);
  std::vector<JsonMember> found;
  {
    const py::gil_scoped_release release;
    found = json_members(data, begin, end, constants_of(constants));
  }
  return table_of(found);
}

py::tuple runs(const py::bytes& text, int64_t begin, int64_t end, int64_t run_bytes,
               bool constants) {
  const char* const data = checked(text, begin, end);
  JsonRuns found;
  {
    const py::gil_scoped_release release;
    found = json_runs(data, begin, end, run_bytes, constants_of(constants));
  }
  return py::make_tuple(found.count, table_of(found.runs));
}

}  // namespace

void bind_json(py::module_& m) {
  m.def("json_members", &members, py::arg("text"), py::arg("begin"), py::arg("end"), py::kw_only(),
        py::arg("constants"));
  m.def("json_runs", &runs, py::arg("text"), py::arg("begin"), py::arg("end"), py::arg("run_bytes"),
        py::kw_only(), py::arg("constants"));
}

}  // namespace agl::bindings
