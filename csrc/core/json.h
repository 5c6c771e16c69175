#pragma once

#include <cstdint>
#include <vector>

namespace agl {

// A member of an object in a text: its name with the quotes, and its value.
struct JsonMember {
  int64_t name_begin;
  int64_t name_end;
  int64_t begin;
  int64_t end;
};

struct JsonSpan {
  int64_t begin;
  int64_t end;
};

// Whether NaN, Infinity and -Infinity are numbers. They are none of JSON's; Python's json module
// reads them.
enum class JsonConstants { kRefused, kAllowed };

// The members of the object that text[begin, end) is, in their order. All of it is checked: it is
// read where Python's json.loads reads it, but for objects and arrays that are nested deeper than
// kMaxJsonDepth. Throws std::invalid_argument naming the position of what is not JSON.
constexpr int kMaxJsonDepth = 800;
std::vector<JsonMember> json_members(const char* text, int64_t begin, int64_t end,
                                     JsonConstants constants);

// Slices of the array that text[begin, end) is: of as many whole elements as fit into run_bytes,
// commas between them included, or of one larger element.
struct JsonRuns {
  int64_t count = 0;  // elements of the array
  std::vector<JsonSpan> runs;
};

// Throws as json_members.
JsonRuns json_runs(const char* text, int64_t begin, int64_t end, int64_t run_bytes,
                   JsonConstants constants);

}  // namespace agl
