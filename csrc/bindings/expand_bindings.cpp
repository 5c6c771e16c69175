#include "bindings/expand_bindings.h"

#include "bindings/flat_arguments.h"

namespace agl::bindings {
namespace py = pybind11;
namespace {

py::tuple counts_of(const FlatRows& flat) {
  const FlatCounts& counts = flat.counts();
  return py::make_tuple(counts.rows, counts.segments, counts.log_probs, counts.tokens,
                        counts.position_dims);
}

void write(const FlatRows& flat, std::uintptr_t buffer) {
  py::gil_scoped_release release;
  flat.write(address<void>(buffer));
}

void expand_host(std::uintptr_t flat, const Counts& counts, int64_t prompt_width,
                 int64_t response_width, int64_t pad_token_id, const py::dict& outputs) {
  const Expand expand =
      expand_arguments(flat, counts, prompt_width, response_width, pad_token_id, outputs);
  py::gil_scoped_release release;
  run_on_host(expand_grid(flat_counts(counts), expand.widths), expand);
}

void pad_host(std::uintptr_t values, std::uintptr_t offsets, int64_t rows, int64_t width,
              int64_t pad_token_id, bool left, std::uintptr_t ids, std::uintptr_t mask) {
  py::gil_scoped_release release;
  run_on_host(RowGrid{rows, width},
              pad_arguments(values, offsets, width, pad_token_id, left, ids, mask));
}

}  // namespace

void bind_expand(py::module_& m) {
  py::class_<FlatRows>(m, "FlatRows")
      .def_property_readonly("counts", &counts_of)
      .def_property_readonly("nbytes", [](const FlatRows& flat) { return flat.counts().nbytes(); })
      .def("write", &write, py::arg("buffer"));
  m.def("expand_host", &expand_host, py::arg("flat"), py::arg("counts"), py::arg("prompt_width"),
        py::arg("response_width"), py::arg("pad_token_id"), py::kw_only(), py::arg("outputs"));
  m.def("pad_host", &pad_host, py::arg("values"), py::arg("offsets"), py::arg("rows"),
        py::arg("width"), py::arg("pad_token_id"), py::kw_only(), py::arg("left"), py::arg("ids"),
        py::arg("mask"));
}

}  // namespace agl::bindings
