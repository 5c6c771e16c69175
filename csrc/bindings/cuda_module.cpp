#include "bindings/flat_arguments.h"
#include "cuda/device.h"
#include "cuda/expand.h"
#include "cuda/pad.h"

namespace py = pybind11;

namespace agl::bindings {
namespace {

void expand(std::uintptr_t flat, const Counts& counts, int64_t prompt_width, int64_t response_width,
            int64_t pad_token_id, const py::dict& outputs, std::uintptr_t stream) {
  const Expand expand =
      expand_arguments(flat, counts, prompt_width, response_width, pad_token_id, outputs);
  py::gil_scoped_release release;
  cuda::expand(expand, expand_grid(flat_counts(counts), expand.widths), address<void>(stream));
}

void pad(std::uintptr_t values, std::uintptr_t offsets, int64_t rows, int64_t width,
         int64_t pad_token_id, bool left, std::uintptr_t ids, std::uintptr_t mask,
         std::uintptr_t stream) {
  py::gil_scoped_release release;
  cuda::pad(pad_arguments(values, offsets, width, pad_token_id, left, ids, mask),
            RowGrid{rows, width}, address<void>(stream));
}

}  // namespace
}  // namespace agl::bindings

PYBIND11_MODULE(_cuda, m) {
  m.def("device_count", &agl::cuda::device_count);
  m.def("expand", &agl::bindings::expand, py::arg("flat"), py::arg("counts"),
        py::arg("prompt_width"), py::arg("response_width"), py::arg("pad_token_id"), py::kw_only(),
        py::arg("outputs"), py::arg("stream"));
  m.def("pad", &agl::bindings::pad, py::arg("values"), py::arg("offsets"), py::arg("rows"),
        py::arg("width"), py::arg("pad_token_id"), py::kw_only(), py::arg("left"), py::arg("ids"),
        py::arg("mask"), py::arg("stream"));
}
