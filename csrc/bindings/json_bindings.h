#pragma once

#include <pybind11/pybind11.h>

namespace agl::bindings {

void bind_json(pybind11::module_& m);

}  // namespace agl::bindings
