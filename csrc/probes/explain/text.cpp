#include <algorithm>
#include <array>
#include <cctype>
#include "probes/explain/parts.h"

namespace brimful::probes {
namespace {

constexpr std::array<std::string_view, 6> kShortages{"MemoryError",      "_ArrayMemoryError",
                                                     "OutOfMemoryError", "BatchTooLarge",
                                                     "RankFailed",       "RankOutOfMemory"};
// OSError and its kinds are not here: a worker that the kernel killed shows as any of them.
constexpr std::array<std::string_view, 18> kMistakeNames{
    "TypeError",          "ValueError",          "KeyError",       "IndexError",
    "LookupError",        "AttributeError",      "NameError",      "UnboundLocalError",
    "ImportError",        "ModuleNotFoundError", "SyntaxError",    "NotImplementedError",
    "ZeroDivisionError",  "ArithmeticError",     "AssertionError", "RecursionError",
    "UnicodeDecodeError", "KeyboardInterrupt"};

template <size_t n>
bool is_one_of(const std::array<std::string_view, n>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const auto end = std::min(text.find('\n'), text.size());
    auto line = text.substr(0, end);
    while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back())) != 0) {
      line.remove_suffix(1);
    }
    lines.push_back(line);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

/// What torchrun puts before each line of a rank: "[rank0]: ".
std::string_view without_rank(std::string_view line) {
  constexpr std::string_view kEnd = "]: ";
  const auto end = line.starts_with("[rank") ? line.find(kEnd) : std::string_view::npos;
  return end == std::string_view::npos ? line : line.substr(end + kEnd.size());
}

/// Of "torch.OutOfMemoryError: CUDA out of memory", the class's name without its module; empty if there is none.
std::string_view class_before(std::string_view line) {
  size_t end = 0;
  size_t begin = 0;
  for (; end < line.size(); ++end) {
    if (line[end] == '.') {
      begin = end + 1;
    } else if (std::isalnum(static_cast<unsigned char>(line[end])) == 0 && line[end] != '_') {
      break;
    }
  }
  const bool is_class = end == line.size() || line[end] == ':' || line[end] == '(';
  return is_class ? line.substr(begin, end - begin) : std::string_view();
}

}  // namespace

std::vector<std::string> types_in(const std::string& text) {
  std::vector<std::string> types;
  std::string mistake;
  for (const auto line : lines_of(text)) {
    const auto name = class_before(without_rank(line));
    if (is_one_of(kShortages, name)) {
      types.insert(types.begin(), name == kShortages[1] ? "MemoryError" : std::string(name));
    } else if (is_one_of(kMistakeNames, name)) {
      mistake = name;
    } else if (name.ends_with("Error") || name.ends_with("Exception")) {
      mistake.clear();  // the last one is the error
    }
  }
  if (!mistake.empty()) {
    types.push_back(mistake);
  }
  return types;
}

bool is_mistake_by_type(const ErrorText& error) {
  return std::any_of(error.types.begin(), error.types.end(),
                     [](const std::string& type) { return is_one_of(kMistakeNames, type); });
}

std::string said_by(const std::string& text) {
  constexpr size_t kMost = 300;
  std::string_view said;
  bool within = false;  // a traceback, whose lines are indented
  for (const auto whole : lines_of(text)) {
    const auto line = without_rank(whole);
    if (line.starts_with("Traceback (most recent call last)")) {
      within = true;
    } else if (!line.empty() && (within ? line.front() != ' ' : said.empty())) {
      said = line;
      within = false;
    }
  }
  said.remove_prefix(std::min(said.find_first_not_of(' '), said.size()));
  return std::string(said.substr(0, kMost));
}

std::optional<std::string> line_behind(const std::string& text, std::string_view begin) {
  const auto at = text.find(begin);
  if (at == std::string::npos) {
    return std::nullopt;
  }
  const auto from = at + begin.size();
  return text.substr(from, std::min(text.find('\n', from), text.size()) - from);
}

}  // namespace brimful::probes
