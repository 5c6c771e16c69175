#pragma once

namespace agl::cuda {

// How many devices the driver shows; 0 without a driver.
int device_count() noexcept;

}  // namespace agl::cuda
