#include "reducer/owners.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "reducer/loop_driver.h"

namespace brimful {
namespace {
struct OwnerEntry {
  const LoopDriver* key = nullptr;
  std::weak_ptr<LoopDriver> loop;
  std::unordered_set<const c10::TensorImpl*> parameters;  ///< its reducer keeps them alive
  const c10d::ProcessGroup* group = nullptr;
};
struct OwnerRegistry {
  std::mutex mutex;
  std::vector<OwnerEntry> entries;
  std::unordered_map<const c10d::ProcessGroup*, std::weak_ptr<GroupTraffic>> traffic;
};
OwnerRegistry& owner_registry() {
  static auto* instance = new OwnerRegistry;
  return *instance;
}

/// Only of entries that match: a thread that held another one's might be the last to.
template <typename Matches>
std::vector<std::shared_ptr<LoopDriver>> living_owners(const Matches& matches) {
  std::vector<std::shared_ptr<LoopDriver>> found;
  const std::lock_guard<std::mutex> lock(owner_registry().mutex);
  for (const auto& entry : owner_registry().entries) {
    auto loop = matches(entry) ? entry.loop.lock() : nullptr;
    if (loop) {
      found.push_back(std::move(loop));
    }
  }
  return found;
}

bool shares_any(const OwnerEntry& entry, const std::vector<at::Tensor>& parameters) {
  return std::any_of(parameters.begin(), parameters.end(), [&](const at::Tensor& parameter) {
    return entry.parameters.count(parameter.unsafeGetTensorImpl()) > 0;
  });
}
}  // namespace

void GroupAbort::abort(c10d::ProcessGroup& group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  begun_ = true;
  group.abort();
}

std::shared_ptr<GroupTraffic> traffic_of(const c10d::ProcessGroup* group) {
  const std::lock_guard<std::mutex> lock(owner_registry().mutex);
  auto& all = owner_registry().traffic;
  std::erase_if(all, [](const auto& item) { return item.second.expired(); });
  auto traffic = all[group].lock();
  if (!traffic) {
    traffic = std::make_shared<GroupTraffic>();
    all[group] = traffic;
  }
  return traffic;
}

void own(const std::shared_ptr<LoopDriver>& loop, const std::vector<at::Tensor>& parameters,
         const c10d::ProcessGroup* group) {
  OwnerEntry entry{loop.get(), loop, {}, group};
  for (const auto& parameter : parameters) {
    entry.parameters.insert(parameter.unsafeGetTensorImpl());
  }
  const std::lock_guard<std::mutex> lock(owner_registry().mutex);
  owner_registry().entries.push_back(std::move(entry));
}

void disown(const LoopDriver* loop) {
  const std::lock_guard<std::mutex> lock(owner_registry().mutex);
  std::erase_if(owner_registry().entries,
                [&](const OwnerEntry& entry) { return entry.key == loop; });
}

std::vector<std::shared_ptr<LoopDriver>> owners_of(const std::vector<at::Tensor>& parameters) {
  return living_owners([&](const OwnerEntry& entry) { return shares_any(entry, parameters); });
}

std::vector<std::shared_ptr<LoopDriver>> reducers_beside(const std::vector<at::Tensor>& parameters,
                                                         const c10d::ProcessGroup* group) {
  return living_owners([&](const OwnerEntry& entry) {
    return entry.group == group || shares_any(entry, parameters);
  });
}

}  // namespace brimful
