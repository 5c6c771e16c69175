#include "cuda/launch.cuh"
#include "cuda/pad.h"

namespace agl::cuda {

void pad(const PadAt& pad, const RowGrid& grid, void* stream) { launch(grid, pad, stream, "pad"); }

}  // namespace agl::cuda
