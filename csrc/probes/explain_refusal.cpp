#include <array>
#include <cmath>
#include <cstdlib>
#include <utility>
#include "probes/explain_parts.h"

namespace brimful::probes {
namespace {

/// The bytes of "12.50 GiB" behind `before`; nothing if it is not there.
std::optional<int64_t> bytes_behind(const std::string& text, std::string_view before) {
  const auto at = text.find(before);
  if (at == std::string::npos) {
    return std::nullopt;
  }
  char* end = nullptr;
  const char* begin = text.c_str() + at + before.size();
  const double number = std::strtod(begin, &end);
  if (end == begin || !std::isfinite(number)) {
    return std::nullopt;
  }
  const std::string_view rest(end);
  constexpr std::array<std::pair<std::string_view, int>, 6> kUnits{
      {{" bytes", 0}, {" B", 0}, {" KiB", 10}, {" MiB", 20}, {" GiB", 30}, {" TiB", 40}}};
  for (const auto& [unit, shift] : kUnits) {
    if (rest.starts_with(unit)) {
      return static_cast<int64_t>(std::ldexp(number, shift));
    }
  }
  return std::nullopt;
}

std::optional<int64_t> first_of(const std::string& text,
                                std::initializer_list<std::string_view> places) {
  for (const auto place : places) {
    if (const auto bytes = bytes_behind(text, place)) {
      return bytes;
    }
  }
  return std::nullopt;
}

}  // namespace

void explain_refusal(const ErrorText& error, const ErrorEvidence& evidence, Explanation& out) {
  out.kind = "out_of_memory";
  out.is_memory = true;
  const auto& text = error.text;
  const auto asked = first_of(text, {"ried to allocate ", "(requested: ", "Unable to allocate "});
  const auto idle = first_of(text, {" of the allocated memory "});
  const auto cached = bytes_behind(text, "is allocated by PyTorch, and ");
  add_bytes(out, "asked for", asked);
  add_bytes(out, "cached by torch and in no tensor", cached ? cached : idle);
  const bool expandable = contains(evidence.allocator_settings, "expandable_segments:True");
  const bool cpu = is_a(error, "MemoryError") || contains(text, "CPU") || contains(text, "mmap");
  if (cpu && !contains(text, "CUDA")) {
    out.cause = "the host's memory, or the limit that was set on it, does not hold this allocation";
    out.remedy = "a smaller batch, or a brimful.BatchSizer, which splits it; a higher limit";
  } else if (asked && cached && *cached >= *asked) {
    out.cause =
        "memory is fragmented: torch has cached more than was asked for, in pieces that are "
        "too small";
    out.remedy =
        expandable ? "fewer different shapes (pad to a few lengths); expandable_segments is on"
                   : "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and fewer different shapes";
  } else {
    out.cause = "the device has no room for this allocation";
    out.remedy =
        "a smaller batch, or a brimful.BatchSizer, which splits it and keeps the gradient; "
        "see what else is on the device with `brimful top`";
  }
}

}  // namespace brimful::probes
