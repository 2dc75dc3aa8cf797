// Reductions, in the order of the ranks.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "communicator.h"

namespace sim_nccl {
namespace {

/// As torch's: rounded to the nearest, ties to even.
class Bfloat16 {
 public:
  Bfloat16() = default;
  explicit Bfloat16(float value) {
    uint32_t wide = 0;
    std::memcpy(&wide, &value, sizeof wide);
    bits_ = static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits_) << 16;
    float value = 0;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }

 private:
  uint16_t bits_ = 0;
};

/// IEEE's of 16 bits; not every compiler knows it by itself.
class Float16 {
 public:
  Float16() = default;
  explicit Float16(float value) {
    const bool negative = std::signbit(value);
    const float size = std::fabs(value);
    uint32_t bits = 0;
    if (std::isnan(size)) {
      bits = 0x7e00;
    } else if (size >= 65520.0F) {  // half way from the largest to the next
      bits = 0x7c00;
    } else if (size < 0x1p-14F) {
      bits = static_cast<uint32_t>(std::nearbyint(size * 0x1p24F));
    } else {
      int exponent = 0;
      const float fraction = std::frexp(size, &exponent);  // from 0.5 to 1
      bits = static_cast<uint32_t>((exponent + 14) << 10) +
             static_cast<uint32_t>(std::nearbyint(fraction * 0x1p11F)) - (1U << 10);
    }
    bits_ = static_cast<uint16_t>(bits | (negative ? 0x8000U : 0U));
  }
  explicit operator float() const {
    const int exponent = (bits_ >> 10) & 31;
    const int mantissa = bits_ & 1023;
    float size = 0;
    if (exponent == 31) {
      size = mantissa == 0 ? INFINITY : NAN;
    } else if (exponent == 0) {
      size = std::ldexp(static_cast<float>(mantissa), -24);
    } else {
      size = std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
    }
    return (bits_ & 0x8000) != 0 ? -size : size;
  }

 private:
  uint16_t bits_ = 0;
};

template <class Wide>
Wide combined(Wide a, Wide b, ncclRedOp_t op) {
  switch (op) {
    case ncclProd:
      return static_cast<Wide>(a * b);
    case ncclMax:
      return std::max(a, b);
    case ncclMin:
      return std::min(a, b);
    default:
      return static_cast<Wide>(a + b);
  }
}

template <class T, class Wide = T>
void combine(void* to, const std::vector<const char*>& from, size_t count, ncclRedOp_t op) {
  const auto value = [&](size_t rank, size_t i) {
    return static_cast<Wide>(reinterpret_cast<const T*>(from[rank])[i]);
  };
  for (size_t i = 0; i < count; ++i) {
    Wide result = value(0, i);
    for (size_t rank = 1; rank < from.size(); ++rank) {
      result = combined(result, value(rank, i), op);
    }
    if (op == ncclAvg) {
      result = static_cast<Wide>(result / static_cast<Wide>(from.size()));
    }
    static_cast<T*>(to)[i] = static_cast<T>(result);
  }
}

}  // namespace

size_t width(ncclDataType_t type) {
  switch (type) {
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    default:
      return 1;
  }
}

void reduce(void* to, const std::vector<const char*>& from, size_t count, ncclDataType_t type,
            ncclRedOp_t op) {
  switch (type) {
    case ncclInt8:
      return combine<int8_t>(to, from, count, op);
    case ncclUint8:
      return combine<uint8_t>(to, from, count, op);
    case ncclInt32:
      return combine<int32_t>(to, from, count, op);
    case ncclUint32:
      return combine<uint32_t>(to, from, count, op);
    case ncclInt64:
      return combine<int64_t>(to, from, count, op);
    case ncclUint64:
      return combine<uint64_t>(to, from, count, op);
    case ncclFloat16:
      return combine<Float16, float>(to, from, count, op);
    case ncclBfloat16:
      return combine<Bfloat16, float>(to, from, count, op);
    case ncclFloat32:
      return combine<float>(to, from, count, op);
    case ncclFloat64:
      return combine<double>(to, from, count, op);
    default:
      std::fprintf(stderr, "simulated NCCL: type %d cannot be reduced\n", static_cast<int>(type));
      std::abort();
  }
}

}  // namespace sim_nccl
