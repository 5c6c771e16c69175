#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace agl {

// Throws std::invalid_argument, which begins with `what` and says what stands at `at` of the text
// [begin, end).
[[noreturn]] inline void fail_at(const char* what, const std::string& expected, const char* begin,
                                 const char* at, const char* end) {
  constexpr std::ptrdiff_t kShown = 16;
  std::string found = "the end";
  if (at < end) {
    found.assign(at, at + std::min(kShown, end - at));
    // What is cut inside a character, or no text at all, must not spoil the message.
    for (char& c : found) c = c >= ' ' && c <= '~' ? c : '?';
    found = "'" + found + "'";
  }
  throw std::invalid_argument(std::string(what) + "expected " + expected + " at position " +
                              std::to_string(at - begin) + ", found " + found);
}

}  // namespace agl
