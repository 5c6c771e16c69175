#include <pybind11/pybind11.h>

#include "bindings/expand_bindings.h"
#include "bindings/json_bindings.h"
#include "bindings/pad_bindings.h"
#include "bindings/plan_bindings.h"

PYBIND11_MODULE(_core, m) {
  agl::bindings::bind_pad(m);
  agl::bindings::bind_plan(m);
  agl::bindings::bind_expand(m);
  agl::bindings::bind_json(m);
}
