#include "cuda/expand.h"
#include "cuda/launch.cuh"

namespace agl::cuda {

void expand(const Expand& expand, const RowGrid& grid, void* stream) {
  launch(grid, expand, stream, "expand");
}

}  // namespace agl::cuda
