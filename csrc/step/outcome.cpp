#include <brimful/step/outcome.h>

namespace brimful {
namespace {
constexpr size_t kMostNamed = 4;

std::string listed(const std::vector<std::string>& names, const char* what) {
  auto text = std::to_string(names.size()) + (names.size() == 1 ? " module " : " modules ") + what;
  for (size_t i = 0; i < names.size() && i < kMostNamed; ++i) {
    text += (i == 0 ? " (" : ", ") + (names[i].empty() ? std::string("the model") : names[i]);
  }
  return text + (names.size() > kMostNamed ? ", ...)" : ")");
}
}  // namespace

std::string to_string(const StepRungs& rungs) {
  if (rungs.everything) {
    return "all that it saves for backward offloaded";
  }
  std::string text;
  if (!rungs.recomputed.empty()) {
    text = listed(rungs.recomputed, "recomputed");
  }
  if (!rungs.offloaded.empty()) {
    text += (text.empty() ? "" : ", ") + listed(rungs.offloaded, "offloaded");
  }
  return text.empty() ? "nothing recomputed or offloaded" : text;
}

}  // namespace brimful
