#pragma once

#include "core/rows.h"

namespace agl {

// Writes every padded tensor of `count` rows in one pass. Prompts end and responses begin at
// column P; pad_id fills the rest of the ids. Rows must fit the widths.
void fill_padded(const Row* rows, int64_t count, const Widths& widths, int64_t pad_id,
                 const PaddedOutput& out);

// Writes the same rows end to end; position_ids dimension by dimension.
void fill_jagged(const Row* rows, int64_t count, const JaggedOutput& out);

}  // namespace agl
