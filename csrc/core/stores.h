#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace agl {

// How memory is written: through the cache, or past it. Output far larger than the cache is not
// read before it is evicted, so streaming spares it the read that every cached store begins with.
enum class Stores { kCached, kStreaming };

// From this many bytes on, output outgrows the caches it would be written through.
constexpr int64_t kStreamingBytes = int64_t{16} << 20;

// Sequential writers. Each returns the end of what it wrote.
template <Stores kStores>
struct Writer;

template <>
struct Writer<Stores::kCached> {
  static int64_t* fill(int64_t* out, int64_t count, int64_t value) {
    for (int64_t i = 0; i < count; ++i) out[i] = value;
    return out + count;
  }

  static int64_t* widen(int64_t* out, const int32_t* ids, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = ids[i];
    return out + count;
  }

  static int64_t* iota(int64_t* out, int64_t count, int64_t first) {
    for (int64_t i = 0; i < count; ++i) out[i] = first + i;
    return out + count;
  }

  static float* zero(float* out, int64_t count) {
    std::memset(out, 0, static_cast<std::size_t>(count) * sizeof(float));
    return out + count;
  }

  static float* copy(float* out, const float* values, int64_t count) {
    std::memcpy(out, values, static_cast<std::size_t>(count) * sizeof(float));
    return out + count;
  }

  static void finish() {}
};

#if defined(__SSE2__)

template <>
struct Writer<Stores::kStreaming> {
  static int64_t* fill(int64_t* out, int64_t count, int64_t value) {
    int64_t* const end = out + count;
    if (count > 0 && !aligned(out)) *out++ = value;
    const __m128i pair = _mm_set1_epi64x(value);
    for (; end - out >= 8; out += 8) {
      store(out, pair);
      store(out + 2, pair);
      store(out + 4, pair);
      store(out + 6, pair);
    }
    for (; end - out >= 2; out += 2) store(out, pair);
    if (out < end) *out++ = value;
    return out;
  }

  // Token ids are never negative, so widening is interleaving with zeros.
  static int64_t* widen(int64_t* out, const int32_t* ids, int64_t count) {
    int64_t* const end = out + count;
    if (count > 0 && !aligned(out)) *out++ = *ids++;
    const __m128i zero = _mm_setzero_si128();
    for (; end - out >= 8; out += 8, ids += 8) {
      const __m128i low = load(ids);
      const __m128i high = load(ids + 4);
      store(out, _mm_unpacklo_epi32(low, zero));
      store(out + 2, _mm_unpackhi_epi32(low, zero));
      store(out + 4, _mm_unpacklo_epi32(high, zero));
      store(out + 6, _mm_unpackhi_epi32(high, zero));
    }
    while (out < end) *out++ = *ids++;
    return out;
  }

  static int64_t* iota(int64_t* out, int64_t count, int64_t next) {
    int64_t* const end = out + count;
    if (count > 0 && !aligned(out)) *out++ = next++;
    __m128i pair = _mm_set_epi64x(next + 1, next);
    const __m128i two = _mm_set1_epi64x(2);
    for (; end - out >= 2; out += 2, next += 2) {
      store(out, pair);
      pair = _mm_add_epi64(pair, two);
    }
    if (out < end) *out++ = next;
    return out;
  }

  static float* zero(float* out, int64_t count) {
    float* const end = out + count;
    while (out < end && !aligned(out)) *out++ = 0.0F;
    const __m128i zeros = _mm_setzero_si128();
    for (; end - out >= 4; out += 4) store(out, zeros);
    while (out < end) *out++ = 0.0F;
    return out;
  }

  static float* copy(float* out, const float* values, int64_t count) {
    return Writer<Stores::kCached>::copy(out, values, count);
  }

  // Streaming stores are weakly ordered: call once after the last one on a thread.
  static void finish() { _mm_sfence(); }

 private:
  static bool aligned(const void* address) {
    return (reinterpret_cast<std::uintptr_t>(address) & 15U) == 0;
  }
  static __m128i load(const int32_t* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  }
  static void store(void* out, __m128i value) {
    _mm_stream_si128(static_cast<__m128i*>(out), value);
  }
};

#else

template <>
struct Writer<Stores::kStreaming> : Writer<Stores::kCached> {};

#endif

}  // namespace agl
