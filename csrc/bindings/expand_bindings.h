#pragma once

#include <pybind11/pybind11.h>

namespace agl::bindings {

// FlatRows, and the device kernels' functors run on the host.
void bind_expand(pybind11::module_& m);

}  // namespace agl::bindings
