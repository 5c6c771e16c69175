#pragma once

#include <pybind11/pybind11.h>

namespace agl::bindings {

// Planner and Rows: calls merged into chains, chains cut into rows, rows written as tensors.
void bind_plan(pybind11::module_& m);

}  // namespace agl::bindings
