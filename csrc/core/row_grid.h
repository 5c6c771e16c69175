#pragma once

#include <algorithm>
#include <cstdint>

#include "core/host_device.h"

namespace agl {

// Blocks of threads over a (rows, columns) tensor. A thread owns pairs of neighbouring columns and
// strides by the grid, so that more rows or columns than blocks are fine.
struct RowGrid {
  static constexpr uint32_t kThreads = 256;
  static constexpr int64_t kMaxRowBlocks = 65535;
  static constexpr int64_t kMaxColumnBlocks = 64;

  int64_t rows;
  int64_t columns;

  bool empty() const { return rows == 0 || columns == 0; }
  uint32_t row_blocks() const { return static_cast<uint32_t>(std::min(rows, kMaxRowBlocks)); }
  uint32_t column_blocks() const {
    constexpr int64_t kColumns = 2 * int64_t{kThreads};
    return static_cast<uint32_t>(std::min((columns + kColumns - 1) / kColumns, kMaxColumnBlocks));
  }
};

// Where one thread stands in its grid.
struct GridThread {
  uint32_t column_block;
  uint32_t column_blocks;
  uint32_t row_block;
  uint32_t row_blocks;
  uint32_t thread;
};

// The work of one thread: `write(row, column)` for every even column it owns.
template <typename Write>
AGL_HD void run_thread(const RowGrid& grid, const GridThread& at, const Write& write) {
  const int64_t first = 2 * (int64_t{at.column_block} * RowGrid::kThreads + at.thread);
  const int64_t stride = 2 * int64_t{at.column_blocks} * RowGrid::kThreads;
  for (int64_t row = at.row_block; row < grid.rows; row += at.row_blocks) {
    for (int64_t column = first; column < grid.columns; column += stride) write(row, column);
  }
}

// Runs every thread of the grid one after the other.
template <typename Write>
void run_on_host(const RowGrid& grid, const Write& write) {
  if (grid.empty()) return;
  GridThread at{0, grid.column_blocks(), 0, grid.row_blocks(), 0};
  for (at.row_block = 0; at.row_block < at.row_blocks; ++at.row_block) {
    for (at.column_block = 0; at.column_block < at.column_blocks; ++at.column_block) {
      for (at.thread = 0; at.thread < RowGrid::kThreads; ++at.thread) run_thread(grid, at, write);
    }
  }
}

}  // namespace agl
