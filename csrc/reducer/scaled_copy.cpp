#include "reducer/scaled_copy.h"

#include <bit>
#include <cmath>
#include <limits>

namespace brimful {
namespace {
template <typename T>
void copy(T* __restrict to, const T* __restrict from, int64_t count, T factor) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = from[i] * factor;
  }
}

uint16_t round_to_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? 0x7FC0U : rounded);  // NaN
}

float widen(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16U);
}
}  // namespace

void to_bfloat16(uint16_t* __restrict to, const float* __restrict from,
                 const float* __restrict error, int64_t count, float factor) {
  if (error == nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      to[i] = round_to_bfloat16(from[i] * factor);
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    to[i] = round_to_bfloat16(from[i] * factor + error[i]);
  }
}

void from_bfloat16(float* __restrict to, const uint16_t* __restrict from, int64_t count,
                   float factor) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = widen(from[i]) * factor;
  }
}

void bfloat16_error(float* __restrict error, const float* __restrict from, int64_t count,
                    float factor, float out_factor) {
  for (int64_t i = 0; i < count; ++i) {
    const float exact = from[i] * factor + error[i];
    const float lost = (exact - widen(round_to_bfloat16(exact))) * out_factor;
    error[i] = std::abs(lost) <= std::numeric_limits<float>::max() ? lost : 0.0F;  // no NaN stays
  }
}

void scaled_copy(float* to, const float* from, int64_t count, float factor) {
  copy(to, from, count, factor);
}

void scaled_copy(double* to, const double* from, int64_t count, double factor) {
  copy(to, from, count, factor);
}

}  // namespace brimful
