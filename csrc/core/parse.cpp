#include "core/parse.h"

#include <cstring>
#include <limits>
#include <string>

#include "core/text_error.h"

namespace agl {
namespace {

constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();

class Parser {
 public:
  Parser(const char* text, int64_t length) : begin_(text), at_(text), end_(text + length) {}

  int64_t array(int32_t* const out) {
    int32_t* next = out;
    expect('[');
    skip_spaces();
    if (at_ < end_ && *at_ == ']') {
      ++at_;
    } else {
      do {
        next = short_numbers(next);
        skip_spaces();
        *next++ = number();
      } while (!closed());
    }
    skip_spaces();
    if (at_ < end_) fail("the end of the text");
    return next - out;
  }

 private:
  // Takes numbers of up to seven digits, each with "," or ", " behind it, eight bytes at a time.
  // Stops before the first one that is something else.
  int32_t* short_numbers(int32_t* next) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    constexpr int64_t kBytes = 8;
    while (end_ - at_ > kBytes) {
      uint64_t text = 0;
      std::memcpy(&text, at_, kBytes);
      const uint64_t digits = text ^ 0x3030303030303030U;
      // The high bit of every byte that is no digit.
      const uint64_t others = ((digits + 0x7676767676767676U) | digits) & 0x8080808080808080U;
      if (others == 0) break;
      const int bits = __builtin_ctzll(others) & ~7;
      const bool leading_zero = (digits & 0xFFU) == 0 && bits > 8;
      if (bits == 0 || leading_zero) break;
      const char* behind = at_ + bits / 8;
      if (*behind != ',') break;
      *next++ = value_of(digits << (64 - bits));
      at_ = behind + 1;
      if (at_ < end_ && *at_ == ' ') ++at_;
    }
#endif
    return next;
  }

  // Eight digits, the first in the lowest byte: pairs, then fours, then all are put together.
  static int32_t value_of(uint64_t digits) {
    constexpr uint64_t kPairs = 0x000000FF000000FFU;
    digits = digits * 10 + (digits >> 8);
    digits =
        (digits & kPairs) * 0x000F424000000064U + (digits >> 16 & kPairs) * 0x0000271000000001U;
    return static_cast<int32_t>(digits >> 32);
  }

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
    fail_at("token ids: ", expected, begin_, at_, end_);
  }

  const char* begin_;
  const char* at_;
  const char* end_;
};

}  // namespace

int64_t parse_token_ids(const char* text, int64_t length, int32_t* out) {
  return Parser(text, length).array(out);
}

}  // namespace agl
