#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace agl {

class TokenReader;

// The sequences a chain's tokens were last read from: its latest prompt, then its latest response.
// A reader that recognises one of them can skip tokens it shares with it. Null where unknown.
struct Echo {
  const TokenReader* prompt = nullptr;
  const TokenReader* response = nullptr;
};

// A sequence of token ids that is not copied until it must be. Ids are checked as they are read;
// a bad one throws.
class TokenReader {
 public:
  virtual ~TokenReader() = default;

  virtual int64_t size() const = 0;
  virtual int32_t at(int64_t index) const = 0;
  virtual void copy(int64_t begin, int64_t end, int32_t* out) const = 0;

  // The first index in [begin, end) whose token is not known[index], or end. `echo` tells where
  // `known` came from.
  virtual int64_t first_difference(int64_t begin, int64_t end, const int32_t* known,
                                   const Echo& echo) const = 0;
};

// The first index in [begin, end) where the arrays differ, or end.
inline int64_t first_difference(const int32_t* a, const int32_t* b, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 256;
  while (begin < end) {
    const int64_t length = std::min(kBlock, end - begin);
    if (std::memcmp(a + begin, b + begin, static_cast<std::size_t>(length) * sizeof(int32_t))) {
      while (a[begin] == b[begin]) ++begin;
      return begin;
    }
    begin += length;
  }
  return end;
}

// Ids already checked, as one array.
class SpanReader final : public TokenReader {
 public:
  SpanReader(const int32_t* ids, int64_t size) : ids_(ids), size_(size) {}

  int64_t size() const override { return size_; }
  int32_t at(int64_t index) const override { return ids_[index]; }
  void copy(int64_t begin, int64_t end, int32_t* out) const override {
    std::copy(ids_ + begin, ids_ + end, out);
  }
  int64_t first_difference(int64_t begin, int64_t end, const int32_t* known,
                           const Echo& /*echo*/) const override {
    return agl::first_difference(ids_, known, begin, end);
  }

 private:
  const int32_t* ids_;
  int64_t size_;
};

// A prompt told as "the first head_size ids of an earlier context, then a tail".
class DeltaReader final : public TokenReader {
 public:
  DeltaReader(const int32_t* head, int64_t head_size, const int32_t* tail, int64_t tail_size)
      : head_(head), head_size_(head_size), tail_(tail), tail_size_(tail_size) {}

  int64_t size() const override { return head_size_ + tail_size_; }
  int32_t at(int64_t index) const override {
    return index < head_size_ ? head_[index] : tail_[index - head_size_];
  }
  void copy(int64_t begin, int64_t end, int32_t* out) const override {
    for (int64_t i = begin; i < end; ++i) *out++ = at(i);
  }
  int64_t first_difference(int64_t begin, int64_t end, const int32_t* known,
                           const Echo& /*echo*/) const override {
    const int64_t middle = std::clamp(head_size_, begin, end);
    begin = agl::first_difference(head_, known, begin, middle);
    if (begin < middle) return begin;
    while (begin < end && tail_[begin - head_size_] == known[begin]) ++begin;
    return begin;
  }

 private:
  const int32_t* head_;
  int64_t head_size_;
  const int32_t* tail_;
  int64_t tail_size_;
};

}  // namespace agl
