#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include "base/format.h"
#include "probes/explain/parts.h"

namespace brimful::probes {
namespace {

/// The bytes of "12.50 GiB" behind `before`; nothing if it is not there.
std::optional<int64_t> bytes_behind(const std::string& text, std::string_view before) {
  const auto at = text.find(before);
  if (at == std::string::npos) {
    return std::nullopt;
  }
  const auto number = read_number(std::string_view(text).substr(at + before.size()));
  if (!number) {
    return std::nullopt;
  }
  constexpr std::array<std::pair<std::string_view, int>, 6> kUnits{
      {{" bytes", 0}, {" B", 0}, {" KiB", 10}, {" MiB", 20}, {" GiB", 30}, {" TiB", 40}}};
  for (const auto& [unit, shift] : kUnits) {
    if (number->rest.starts_with(unit)) {
      return static_cast<int64_t>(std::ldexp(number->value, shift));
    }
  }
  return std::nullopt;
}

/// The bytes of "6.99 GiB allowed;" in front of `after`; nothing if it is not there.
std::optional<int64_t> bytes_before(const std::string& text, std::string_view after) {
  const auto end = text.find(after);
  if (end == std::string::npos) {
    return std::nullopt;
  }
  const auto unit = text.rfind(' ', end - 1);
  const auto number = unit == std::string::npos || unit == 0 ? unit : text.rfind(' ', unit - 1);
  return number == std::string::npos ? std::nullopt
                                     : bytes_behind(text.substr(number, end - number), " ");
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

// As brimful's sizer, map_batches, pipeline and steps with `accumulate` begin a BatchTooLarge.
constexpr std::array<std::string_view, 9> kTooLarge{
    "no split of the batch fits",
    "the loss over all pairs does not fit, whatever the split",
    "in lockstep no rank may split further by itself",
    "the optimizer's step would run out of memory, whatever the split",
    "no piece that was tried fits",
    "a piece of one row does not fit",
    "no number of microbatches fits",
    "so no other number of microbatches was tried",
    "memory ran out for the copy of the gradients"};
constexpr std::array<std::string_view, 5> kHostWords{
    "CPU", "mmap", "std::bad_alloc", "Cannot allocate memory", "Unable to allocate"};

struct HolderInText {
  std::string pid;
  int64_t bytes = 0;
};

/// As torch's error lists those on the device: "Process 3619440 has 70.00 GiB memory in use."
std::vector<HolderInText> processes_in(const std::string& text) {
  constexpr std::string_view kBefore = "Process ";
  constexpr size_t kMost = 64;
  std::vector<HolderInText> found;
  for (size_t at = text.find(kBefore); at != std::string::npos && found.size() < kMost;
       at = text.find(kBefore, at + 1)) {
    const auto digits = at + kBefore.size();
    const auto end = text.find_first_not_of("0123456789", digits);
    if (end == std::string::npos || end == digits) {
      continue;
    }
    const auto rest = text.substr(at, text.find(" memory in use", at) - at);
    if (const auto bytes = bytes_behind(rest, text.substr(at, end - at) + " has ")) {
      found.push_back({text.substr(digits, end - digits), *bytes});
    }
  }
  return found;
}

struct Use {
  std::vector<HolderInText> others;
  int64_t other_bytes = 0;
  int64_t own_bytes = 0;
};

/// A container hides which of the processes is this one: then it is the smallest that can hold what torch has.
Use use_in(const std::string& text) {
  constexpr int64_t kAbsurd = int64_t{1} << 50;  // torch's number where NVML knows none
  Use use{processes_in(text)};
  const auto said = bytes_behind(text, "this process has ");
  use.own_bytes = first_of(text, {"Of the allocated memory "}).value_or(0) +
                  bytes_behind(text, "is allocated by PyTorch, and ").value_or(0);
  if (said && *said < kAbsurd) {
    use.own_bytes = *said;
  } else {
    auto own = use.others.end();
    for (auto at = use.others.begin(); at != use.others.end(); ++at) {
      if (at->bytes >= use.own_bytes && (own == use.others.end() || at->bytes < own->bytes)) {
        own = at;
      }
    }
    if (own != use.others.end()) {
      use.others.erase(own);
    }
  }
  for (const auto& process : use.others) {
    use.other_bytes += process.bytes;
  }
  return use;
}

struct Verdict {
  std::string cause;
  std::string remedy;
};

/// Other processes, where they hold at least as much as this one, and enough for the request.
std::optional<Verdict> verdict_on_others(const Use& use, const std::optional<int64_t>& asked) {
  if (use.others.empty() || use.other_bytes < use.own_bytes ||
      use.other_bytes < asked.value_or(0)) {
    return std::nullopt;
  }
  const bool one = use.others.size() == 1;
  return Verdict{
      (one ? "process " + use.others.front().pid + " holds "
           : std::to_string(use.others.size()) + " other processes hold ") +
          format_bytes(use.other_bytes) + " of this device, and this process " +
          format_bytes(use.own_bytes) + ": the rest has no room for this allocation",
      std::string(one ? "end that process" : "end those processes") +
          " (`brimful top` lists them), or use another device: a smaller batch does not free what "
          "others hold"};
}

struct Numbers {
  std::optional<int64_t> asked;
  std::optional<int64_t> cached;
  std::optional<int64_t> allocated;
  std::optional<int64_t> capacity;
  std::optional<int64_t> free;
  std::optional<int64_t> allowed;
};

constexpr const char* kSplitIt =
    "a smaller batch, or a brimful.BatchSizer, which splits it, keeps the gradient, and "
    "recomputes or offloads what a single row saves (in a validation brimful.map_batches)";

/// Whether what is cached would make a difference: a twentieth of all that torch holds. Where less is idle the device is full,
/// though this one request would fit into what is idle.
bool is_fragmented(const Numbers& numbers) {
  constexpr int64_t kPart = 20;
  return numbers.asked && numbers.cached && *numbers.cached >= *numbers.asked &&
         *numbers.cached * kPart >= *numbers.cached + numbers.allocated.value_or(0);
}

Verdict verdict_on_fragments(const std::string& text, const ErrorEvidence& evidence) {
  const bool expandable = contains(evidence.allocator_settings, "expandable_segments:True");
  const bool has_segments = !contains(text, "HIP out of memory");  // not on ROCm
  return {
      "memory is fragmented: torch has cached more than was asked for, in pieces that are "
      "too small",
      expandable ? "fewer different shapes (pad to a few lengths); expandable_segments is on"
      : !has_segments
          ? "fewer different shapes (pad to a few lengths), or a smaller batch"
          : "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and fewer different shapes"};
}

/// The process's own bound, with room on the device.
std::optional<Verdict> verdict_on_limit(const Numbers& numbers) {
  if (!numbers.allowed || !numbers.free || *numbers.free < numbers.asked.value_or(0) ||
      is_fragmented(numbers)) {
    return std::nullopt;
  }
  return Verdict{"this process may take " + format_bytes(*numbers.allowed) +
                     " of the device, and has them; " + format_bytes(*numbers.free) +
                     " of the device are free",
                 std::string("a higher limit (brimful.memory.set_limit, or "
                             "torch.cuda.set_per_process_memory_fraction); ") +
                     kSplitIt};
}

Verdict verdict_on_full_device(const Numbers& numbers) {
  if (numbers.asked && numbers.capacity && *numbers.asked > *numbers.capacity) {
    return {"one request (" + format_bytes(*numbers.asked) +
                ") is larger than all of the device (" + format_bytes(*numbers.capacity) + ")",
            std::string(kSplitIt) +
                "; of a GPU that shares the host's memory the driver says how much it may take"};
  }
  std::string cause = "the device has no room for this allocation";
  if (numbers.cached && numbers.asked && *numbers.cached >= *numbers.asked) {
    cause += ": " + format_bytes(numbers.allocated.value_or(0)) +
             " are tensors, and what torch has cached beside them is little";
  }
  return {std::move(cause),
          std::string(kSplitIt) + "; see what else is on the device with `brimful top`"};
}

}  // namespace

bool is_refusal_of_host(std::string_view text) {
  return contains(text, "Cannot allocate memory") || contains(text, "CPU out of memory. Tried") ||
         (contains(text, "Unable to allocate ") && contains(text, "for an array with shape"));
}

std::optional<std::string> too_large_in(const std::string& text) {
  for (const auto begin : kTooLarge) {
    if (const auto behind = line_behind(text, begin)) {
      return std::string(begin) + *behind;
    }
  }
  return std::nullopt;
}

Explanation explain_too_large(const ErrorText& error) {
  Explanation out;
  out.kind = "out_of_memory";
  out.is_memory = true;
  out.cause = too_large_in(error.text).value_or("nothing that was tried fits");
  out.remedy = line_behind(error.text, "Try next: ")
                   .value_or(
                       "one larger batch to a step without accumulate, a smaller model or "
                       "input, or a device with more memory");
  if (auto tried = line_behind(error.text, "Tried: ")) {
    if (tried->ends_with('.')) {
      tried->pop_back();
    }
    out.evidence.push_back("tried: " + *tried);
  }
  return out;
}

Explanation explain_refusal(const ErrorText& error, const ErrorEvidence& evidence) {
  Explanation out;
  out.kind = "out_of_memory";
  out.is_memory = true;
  const auto& text = error.text;
  const Numbers numbers{
      first_of(text, {"ried to allocate ", "(requested: ", "Unable to allocate "}),
      bytes_behind(text, "is allocated by PyTorch, and "),
      first_of(text, {"Of the allocated memory "}),
      bytes_behind(text, "total capacity of "),
      bytes_behind(text, " of which "),
      bytes_before(text, " allowed;")};
  const auto idle = first_of(text, {" of the allocated memory "});
  add_bytes(out.evidence, "asked for", numbers.asked);
  add_bytes(out.evidence, "cached by torch and in no tensor",
            numbers.cached ? numbers.cached : idle);
  const bool host = is_a(error, "MemoryError") ||
                    std::any_of(kHostWords.begin(), kHostWords.end(),
                                [&](std::string_view part) { return contains(text, part); });
  const auto likely = line_behind(text, "Likely cause: ");
  const auto next = line_behind(text, "Try next: ");
  // The first: brimful looked where it happened.
  auto verdict =
      likely && next ? std::optional(Verdict{*likely, *next}) : verdict_on_limit(numbers);
  if (!verdict) {
    const auto use = use_in(text);
    for (const auto& process : use.others) {
      out.evidence.push_back("process " + process.pid + " has " + format_bytes(process.bytes) +
                             " of the device");
    }
    verdict = verdict_on_others(use, numbers.asked);
  }
  if (!verdict && host && !contains(text, "CUDA")) {
    verdict = {
        "the host's memory, or the limit that was set on it, does not hold this allocation",
        "a smaller batch, or a brimful.BatchSizer, which splits it and recomputes or offloads what "
        "a single row saves (in a validation brimful.map_batches); a higher limit"};
  } else if (!verdict) {
    verdict = is_fragmented(numbers) ? verdict_on_fragments(text, evidence)
                                     : verdict_on_full_device(numbers);
  }
  out.cause = std::move(verdict->cause);
  out.remedy = std::move(verdict->remedy);
  return out;
}

}  // namespace brimful::probes
