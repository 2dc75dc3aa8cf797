#include "probes/oom/attention_line.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <fstream>
#include <regex>
#include <string>
#include <string_view>

namespace brimful::probes {
namespace {

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

template <size_t n>
bool has_any(const std::string& text, const std::array<std::string_view, n>& names) {
  return std::any_of(names.begin(), names.end(),
                     [&](std::string_view word) { return text.find(word) != std::string::npos; });
}

std::string line_of(const memory::Site& site) {
  constexpr int kMostLines = 100'000;
  constexpr size_t kMostWidth = 1000;
  std::string line;
  if (site.file.empty() || site.line < 1 || site.line > kMostLines) {
    return line;
  }
  std::ifstream file(site.file);
  for (int i = 0; i < site.line; ++i) {
    if (!std::getline(file, line)) {
      return "";
    }
  }
  line.resize(std::min(line.size(), kMostWidth));
  return line;
}

}  // namespace

bool is_attention(const memory::Site& site) noexcept {
  constexpr std::array<std::string_view, 2> kNames{"attention", "attn"};
  constexpr std::array<std::string_view, 6> kOnScores{"softmax", "masked_fill", "einsum",
                                                      "matmul",  "bmm",         "@"};
  try {
    // Keys that are turned for a product with queries; a weight that is turned is a linear layer.
    static const std::regex keys(
        "(^|[^a-z])(k|key[a-z_]*|[a-z_]+_k)\\.(transpose|mt|t|permute|swapaxes)\\b");
    const auto line = lower(line_of(site));
    return has_any(lower(site.function), kNames) || has_any(line, kNames) ||
           std::regex_search(line, keys) ||
           (line.find("score") != std::string::npos && has_any(line, kOnScores));
  } catch (...) {
    return false;
  }
}

}  // namespace brimful::probes
