#include "launch/all_or_none.h"

#include <chrono>
#include <thread>

namespace brimful::launch {
namespace {
constexpr std::chrono::milliseconds kLookEvery{3};
}  // namespace

bool all_or_none(c10d::Store& store, const std::string& place, int64_t size, bool comes,
                 const std::function<bool()>& is_over) {
  const auto came = place + "/came";
  if (comes) {
    store.add(came, 1);
  }
  while (true) {
    const bool over =
        !comes || is_over();  // first: who leaves behind the last that came is not missing
    const bool all = comes && store.add(came, 0) >= size;
    if (all || over || is_decided(store, place)) {
      const std::string own = all ? "all" : "none";
      return store.compareSet(place, std::string(), own) == "all";
    }
    std::this_thread::sleep_for(kLookEvery);
  }
}

}  // namespace brimful::launch
