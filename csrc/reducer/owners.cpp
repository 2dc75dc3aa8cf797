#include "reducer/owners.h"

#include <brimful/reducer/reducer.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>

namespace brimful {
namespace {
struct Entry {
  const Reducer* key = nullptr;
  std::weak_ptr<Reducer> reducer;
  std::unordered_set<const c10::TensorImpl*> parameters;  ///< the reducer keeps them alive
  const c10d::ProcessGroup* group = nullptr;
};
struct Registry {
  std::mutex mutex;
  std::vector<Entry> entries;
};
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

/// Only of entries that match: a thread that held another one's reducer might be the last to.
template <typename Matches>
std::vector<std::shared_ptr<Reducer>> living(const Matches& matches) {
  std::vector<std::shared_ptr<Reducer>> found;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  for (const auto& entry : registry().entries) {
    auto reducer = matches(entry) ? entry.reducer.lock() : nullptr;
    if (reducer) {
      found.push_back(std::move(reducer));
    }
  }
  return found;
}

bool shares(const Entry& entry, const std::vector<at::Tensor>& parameters) {
  return std::any_of(parameters.begin(), parameters.end(), [&](const at::Tensor& parameter) {
    return entry.parameters.count(parameter.unsafeGetTensorImpl()) > 0;
  });
}
}  // namespace

void own(const std::shared_ptr<Reducer>& reducer, const std::vector<at::Tensor>& parameters,
         const c10d::ProcessGroup* group) {
  Entry entry{reducer.get(), reducer, {}, group};
  for (const auto& parameter : parameters) {
    entry.parameters.insert(parameter.unsafeGetTensorImpl());
  }
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().entries.push_back(std::move(entry));
}

void disown(const Reducer* reducer) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  std::erase_if(registry().entries, [&](const Entry& entry) { return entry.key == reducer; });
}

std::vector<std::shared_ptr<Reducer>> owners_of(const std::vector<at::Tensor>& parameters) {
  return living([&](const Entry& entry) { return shares(entry, parameters); });
}

std::vector<std::shared_ptr<Reducer>> reducers_beside(const std::vector<at::Tensor>& parameters,
                                                      const c10d::ProcessGroup* group) {
  return living(
      [&](const Entry& entry) { return entry.group == group || shares(entry, parameters); });
}

}  // namespace brimful
