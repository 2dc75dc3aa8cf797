#include "step/remedy.h"

#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "base/format.h"

namespace brimful {
namespace {
using Unit = std::pair<std::string_view, double>;
constexpr std::array<Unit, 4> kUnits{
    Unit{" bytes", 1.0},
    Unit{" KiB", 1024.0},
    Unit{" MiB", 1048576.0},
    Unit{" GiB", 1073741824.0},
};

std::optional<int64_t> bytes_in(std::string_view text) {
  for (const auto& [unit, factor] : kUnits) {
    if (text.size() <= unit.size() || !text.ends_with(unit)) {
      continue;
    }
    const auto digits = text.substr(0, text.size() - unit.size());
    const auto number = read_number(digits);
    if (digits.find_first_not_of("0123456789.") != std::string_view::npos || !number) {
      return std::nullopt;
    }
    return std::llround(number->value * factor);
  }
  return std::nullopt;
}

/// The size that stands in front of `what`: number and unit, with a space between.
std::optional<int64_t> bytes_before(std::string_view message, std::string_view what) {
  const auto end = message.find(what);
  if (end == std::string_view::npos) {
    return std::nullopt;
  }
  const auto head = message.substr(0, end);
  const auto space = head.rfind(' ');
  if (space == std::string_view::npos || space == 0) {
    return std::nullopt;
  }
  const auto begin = head.rfind(' ', space - 1);
  return bytes_in(begin == std::string_view::npos ? head : head.substr(begin + 1));
}

std::optional<int64_t> bytes_after(std::string_view message, std::string_view what) {
  const auto at = message.find(what);
  if (at == std::string_view::npos) {
    return std::nullopt;
  }
  const auto tail = message.substr(at + what.size());
  const auto space = tail.find(' ');
  if (space == std::string_view::npos) {
    return std::nullopt;
  }
  const auto end = tail.find_first_of(" .,;", space + 1);
  return bytes_in(tail.substr(0, end));
}
}  // namespace

std::optional<Refusal> refusal_in(std::string_view message) {
  const auto request = bytes_after(message, "out of memory. Tried to allocate ");
  const auto free = bytes_before(message, " is free");
  const auto allocated = bytes_before(message, " is allocated by PyTorch");
  const auto cached = bytes_before(message, " is reserved by PyTorch but unallocated");
  if (!request || !free || !allocated || !cached) {
    return std::nullopt;
  }
  return Refusal{request, *free, *allocated + *cached, *allocated,
                 bytes_before(message, " allowed;")};
}

// In one piece, what is cached and what is left would have held the request: not capacity is short.
Remedy remedy_for(const Refusal& refusal) {
  const auto cached = refusal.reserved_bytes - refusal.allocated_bytes;
  if (cached <= 0) {
    return Remedy::finer;
  }
  if (!refusal.request_bytes) {
    return Remedy::release_cache;
  }
  const auto allowed =
      refusal.limit_bytes ? *refusal.limit_bytes - refusal.reserved_bytes : refusal.free_bytes;
  const auto room = std::max<int64_t>(0, std::min(allowed, refusal.free_bytes));
  return cached + room >= *refusal.request_bytes ? Remedy::release_cache : Remedy::finer;
}

bool release_helps(const std::string& shortage, c10::Device device) {
  auto refusal = refusal_in(shortage);
  const auto kind = shortage_in(shortage);
  if (!refusal && (kind == Shortage::outside || kind == Shortage::unclear)) {
    const auto now = memory::stats(device);
    refusal.emplace();
    refusal->reserved_bytes = now.reserved_bytes;
    refusal->allocated_bytes = now.used_bytes;
  }
  return refusal && remedy_for(*refusal) == Remedy::release_cache;
}

}  // namespace brimful
