#pragma once

#include <pybind11/pybind11.h>

namespace agl::bindings {

// Padding of token sequences, and reading them from text.
void bind_pad(pybind11::module_& m);

}  // namespace agl::bindings
