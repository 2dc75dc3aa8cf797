// A process group's threads may hold tensors of Python, which need an interpreter to die: its last owner must let go, and
// so join them, before the interpreter ends.
#include "reducer/at_exit.h"

#include <mutex>
#include <unordered_map>
#include <utility>

namespace brimful {
namespace {
struct Releases {
  std::mutex mutex;
  std::unordered_map<const void*, std::function<void()>> by_owner;
};
Releases& releases() {
  static auto* instance = new Releases;
  return *instance;
}
}  // namespace

void release_at_exit(const void* owner, std::function<void()> release) {
  const std::lock_guard<std::mutex> lock(releases().mutex);
  releases().by_owner[owner] = std::move(release);
}

void forget_at_exit(const void* owner) {
  const std::lock_guard<std::mutex> lock(releases().mutex);
  releases().by_owner.erase(owner);
}

int64_t registered_at_exit() {
  const std::lock_guard<std::mutex> lock(releases().mutex);
  return static_cast<int64_t>(releases().by_owner.size());
}

void release_groups() {
  decltype(Releases::by_owner) all;
  {
    const std::lock_guard<std::mutex> lock(releases().mutex);
    all.swap(releases().by_owner);
  }
  for (const auto& [owner, release] : all) {
    release();  // without the lock: it may hold the last reference to a reducer, which then forgets itself
  }
}

}  // namespace brimful
