#include "core/parse.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace agl {
namespace {

constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();

class Parser {
 public:
  Parser(const char* text, int64_t length) : begin_(text), at_(text), end_(text + length) {}

  std::vector<int32_t> array() {
    std::vector<int32_t> ids;
    ids.reserve(static_cast<std::size_t>(end_ - at_) / 4 + 1);
    expect('[');
    skip_spaces();
    if (at_ < end_ && *at_ == ']') {
      ++at_;
    } else {
      ids.push_back(number());
      while (!closed()) ids.push_back(number());
    }
    skip_spaces();
    if (at_ < end_) fail("the end of the text");
    return ids;
  }

 private:
  void expect(char wanted) {
    skip_spaces();
    if (at_ == end_ || *at_ != wanted) fail(std::string("'") + wanted + "'");
    ++at_;
  }

  // Takes a comma (false) or the closing bracket (true).
  bool closed() {
    skip_spaces();
    if (at_ < end_ && *at_ == ',') {
      ++at_;
      skip_spaces();
      return false;
    }
    if (at_ < end_ && *at_ == ']') {
      ++at_;
      return true;
    }
    fail("',' or ']'");
  }

  int32_t number() {
    const char* const first = at_;
    int64_t value = 0;
    while (at_ < end_) {
      const unsigned digit = static_cast<unsigned char>(*at_) - unsigned{'0'};
      if (digit > 9) break;
      value = value * 10 + digit;
      if (value > kMaxId) {
        at_ = first;
        fail("a token id of at most 2147483647");
      }
      ++at_;
    }
    if (at_ == first || (*first == '0' && at_ - first > 1)) {
      at_ = first;
      fail("a token id (a non-negative integer)");
    }
    return static_cast<int32_t>(value);
  }

  void skip_spaces() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) ++at_;
  }

  [[noreturn]] void fail(const std::string& expected) const {
    constexpr int64_t kShown = 16;
    const std::string found = at_ == end_
                                  ? std::string("the end")
                                  : "'" + std::string(at_, std::min(at_ + kShown, end_)) + "'";
    throw std::invalid_argument("token ids: expected " + expected + " at position " +
                                std::to_string(at_ - begin_) + ", found " + found);
  }

  const char* begin_;
  const char* at_;
  const char* end_;
};

}  // namespace

std::vector<int32_t> parse_token_ids(const char* text, int64_t length) {
  return Parser(text, length).array();
}

}  // namespace agl
