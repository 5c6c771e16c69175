#include "core/json.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "core/text_error.h"

namespace agl {
namespace {

// What Python's int() reads.
constexpr std::ptrdiff_t kMaxDigits = 4300;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool is_hex_digit(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

class Scanner {
 public:
  Scanner(const char* text, int64_t begin, int64_t end, JsonConstants constants)
      : text_(text), at_(text + begin), end_(text + end), constants_(constants) {
    skip_spaces();
  }

  // Takes an object; calls on_member(name_begin, name_end, begin, end) with pointers.
  template <typename OnMember>
  void object(int depth, const OnMember& on_member) {
    open('{', depth);
    if (take('}')) return;
    do {
      const char* const name = at_;
      if (peek() != '"') fail("a name in '\"'");
      string();
      const char* const name_end = at_;
      skip_spaces();
      expect(':');
      skip_spaces();
      const char* const begin = at_;
      value(depth + 1);
      on_member(name, name_end, begin, at_);
    } while (!closed('}'));
  }

  // Takes an array; calls on_element(begin, end) with pointers.
  template <typename OnElement>
  void array(int depth, const OnElement& on_element) {
    open('[', depth);
    if (take(']')) return;
    do {
      const char* const begin = at_;
      value(depth + 1);
      on_element(begin, at_);
    } while (!closed(']'));
  }

  void expect_end() {
    skip_spaces();
    if (at_ < end_) fail("the end of the text");
  }

  int64_t offset_of(const char* at) const { return at - text_; }

 private:
  void value(int depth) {
    switch (peek()) {
      case '{':
        return object(depth, [](auto...) {});
      case '[':
        return array(depth, [](auto...) {});
      case '"':
        return string();
      case 't':
        return word("true");
      case 'f':
        return word("false");
      case 'n':
        return word("null");
      case 'N':
        return constant("NaN");
      case 'I':
        return constant("Infinity");
      default:
        return number();
    }
  }

  void open(char bracket, int depth) {
    if (depth > kMaxJsonDepth) fail("at most " + std::to_string(kMaxJsonDepth) + " nested values");
    expect(bracket);
    skip_spaces();
  }

  // Takes a comma and what spaces follow (false), or the closing bracket (true).
  bool closed(char bracket) {
    skip_spaces();
    if (take(',')) {
      skip_spaces();
      return false;
    }
    if (take(bracket)) return true;
    fail(std::string("',' or '") + bracket + "'");
  }

  // Takes a string, quotes included.
  void string() {
    ++at_;
    while (true) {
      skip_plain();
      const char c = peek();
      if (at_ == end_ || static_cast<unsigned char>(c) < 0x20) fail("'\"' after the text");
      if (c == '"') {
        ++at_;
        return;
      }
      if (c == '\\') {
        escape();
      } else if (static_cast<unsigned char>(c) < 0x80) {
        ++at_;
      } else {
        utf8();
      }
    }
  }

  // Skips ASCII that is no quote, backslash or control character, eight bytes at a time.
  void skip_plain() {
    constexpr uint64_t kOnes = 0x0101010101010101U;
    constexpr uint64_t kHigh = 0x8080808080808080U;
    constexpr std::ptrdiff_t kBytes = 8;
    while (end_ - at_ >= kBytes) {
      uint64_t bytes = 0;
      std::memcpy(&bytes, at_, kBytes);
      const uint64_t quotes = bytes ^ (kOnes * '"');
      const uint64_t slashes = bytes ^ (kOnes * '\\');
      const uint64_t found = bytes | (bytes - kOnes * 0x20) | (quotes - kOnes) | (slashes - kOnes);
      if ((found & kHigh) != 0) return;
      at_ += kBytes;
    }
  }

  void escape() {
    ++at_;
    const char c = peek();
    if (c == 'u') {
      ++at_;
      for (int digit = 0; digit < 4; ++digit, ++at_) {
        if (!is_hex_digit(peek())) fail("four hexadecimal digits");
      }
    } else if (c != '\0' && std::strchr("\"\\/bfnrt", c) != nullptr) {
      ++at_;
    } else {
      fail("an escape sequence of JSON");
    }
  }

  // Takes one character beyond ASCII. Surrogates count as characters, as with Python's handler
  // "surrogatepass".
  void utf8() {
    const auto lead = static_cast<unsigned char>(*at_);
    int more = 0;
    unsigned char lowest = 0x80;
    unsigned char highest = 0xBF;
    if (lead >= 0xC2 && lead <= 0xDF) {
      more = 1;
    } else if ((lead & 0xF0) == 0xE0) {
      more = 2;
      if (lead == 0xE0) lowest = 0xA0;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
      more = 3;
      if (lead == 0xF0) lowest = 0x90;
      if (lead == 0xF4) highest = 0x8F;
    } else {
      fail("UTF-8");
    }
    if (end_ - at_ <= more) fail("UTF-8");
    const auto second = static_cast<unsigned char>(at_[1]);
    if (second < lowest || second > highest) fail("UTF-8");
    for (int i = 2; i <= more; ++i) {
      if ((static_cast<unsigned char>(at_[i]) & 0xC0) != 0x80) fail("UTF-8");
    }
    at_ += more + 1;
  }

  void number() {
    const char* const begin = at_;
    take('-');
    if (peek() == 'I') return constant("Infinity");
    if (!take('0')) digits("a value of JSON");
    bool is_integer = true;
    // Python reads "1.x" as 1, and then complains of what follows: so do callers of this.
    if (peek() == '.' && at_ + 1 < end_ && is_digit(at_[1])) {
      ++at_;
      digits("digits");
      is_integer = false;
    }
    if (peek() == 'e' || peek() == 'E') {
      const char* const exponent = at_++;
      if (!take('-')) take('+');
      if (is_digit(peek())) {
        digits("digits");
        is_integer = false;
      } else {
        at_ = exponent;
      }
    }
    if (is_integer && at_ - begin > kMaxDigits + (*begin == '-')) {
      at_ = begin;
      fail("an integer of at most " + std::to_string(kMaxDigits) + " digits");
    }
  }

  void digits(const char* expected) {
    if (!is_digit(peek())) fail(expected);
    while (is_digit(peek())) ++at_;
  }

  void constant(const char* name) {
    if (constants_ == JsonConstants::kRefused) fail("a value of JSON");
    word(name);
  }

  void word(const char* name) {
    const auto length = static_cast<std::ptrdiff_t>(std::strlen(name));
    if (end_ - at_ < length || std::memcmp(at_, name, static_cast<std::size_t>(length)) != 0) {
      fail("a value of JSON");
    }
    at_ += length;
  }

  void skip_spaces() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) ++at_;
  }

  // '\0' at the end; a '\0' of the text is never expected either.
  char peek() const { return at_ < end_ ? *at_ : '\0'; }

  bool take(char wanted) {
    if (peek() != wanted) return false;
    ++at_;
    return true;
  }

  void expect(char wanted) {
    if (!take(wanted)) fail(std::string("'") + wanted + "'");
  }

  [[noreturn]] void fail(const std::string& expected) const {
    fail_at("", expected, text_, at_, end_);
  }

  const char* text_;
  const char* at_;
  const char* end_;
  JsonConstants constants_;
};

}  // namespace

std::vector<JsonMember> json_members(const char* text, int64_t begin, int64_t end,
                                     JsonConstants constants) {
  std::vector<JsonMember> members;
  Scanner scanner(text, begin, end, constants);
  scanner.object(1,
                 [&](const char* name, const char* name_end, const char* first, const char* last) {
                   members.push_back({scanner.offset_of(name), scanner.offset_of(name_end),
                                      scanner.offset_of(first), scanner.offset_of(last)});
                 });
  scanner.expect_end();
  return members;
}

JsonRuns json_runs(const char* text, int64_t begin, int64_t end, int64_t run_bytes,
                   JsonConstants constants) {
  JsonRuns found;
  Scanner scanner(text, begin, end, constants);
  scanner.array(1, [&](const char* first_at, const char* last_at) {
    const int64_t first = scanner.offset_of(first_at);
    const int64_t last = scanner.offset_of(last_at);
    ++found.count;
    if (found.runs.empty() || last - found.runs.back().begin > run_bytes) {
      found.runs.push_back({first, last});
    } else {
      found.runs.back().end = last;
    }
  });
  scanner.expect_end();
  return found;
}

}  // namespace agl
