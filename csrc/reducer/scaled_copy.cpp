#include "reducer/scaled_copy.h"

#include <bit>
#include <cmath>
#include <limits>

// Compiled for newer instruction sets too, and chosen when the library is loaded; sanitizers run before that.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define BRIMFUL_VECTORISED __attribute__((target_clones("avx2", "default")))
#else
#define BRIMFUL_VECTORISED
#endif

namespace brimful {
namespace {
template <typename T>
void copy(T* __restrict to, const T* __restrict from, int64_t count, T factor) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = from[i] * factor;
  }
}

inline uint16_t round_to_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? 0x7FC0U : rounded);  // NaN
}

inline float widen(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16U);
}
}  // namespace

BRIMFUL_VECTORISED void to_bfloat16(uint16_t* __restrict to, const float* __restrict from,
                                    int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = round_to_bfloat16(from[i] * factor);
  }
}

BRIMFUL_VECTORISED void to_bfloat16(uint16_t* __restrict to, const float* __restrict from,
                                    const float* __restrict error, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = round_to_bfloat16(from[i] * factor + error[i]);
  }
}

BRIMFUL_VECTORISED void from_bfloat16(float* __restrict to, const uint16_t* __restrict from,
                                      int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = widen(from[i]) * factor;
  }
}

BRIMFUL_VECTORISED void from_bfloat16(float* __restrict gradient, const uint16_t* __restrict sum,
                                      float* __restrict error, int64_t count, float factor,
                                      float sent_factor, float carry) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  for (int64_t i = 0; i < count; ++i) {
    const float exact = gradient[i] * sent_factor + error[i];
    const float lost = (exact - widen(round_to_bfloat16(exact))) * carry;
    error[i] = std::abs(lost) <= kLargest ? lost : 0.0F;  // no NaN stays
    gradient[i] = widen(sum[i]) * factor;
  }
}

void scaled_copy(float* to, const float* from, int64_t count, float factor) {
  copy(to, from, count, factor);
}

void scaled_copy(double* to, const double* from, int64_t count, double factor) {
  copy(to, from, count, factor);
}

}  // namespace brimful
