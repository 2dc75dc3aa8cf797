#include "reducer/host_watch.h"

#include <utility>

namespace brimful {
namespace {
std::string place_of_leaving(const std::string& prefix, int rank) {
  return prefix + "left/" + std::to_string(rank);
}

/// True if that is not known.
bool has_any_left(c10d::Store& store, const std::string& prefix, int own_rank, int world_size) {
  try {
    for (int rank = 0; rank < world_size; ++rank) {
      if (rank != own_rank && store.check({place_of_leaving(prefix, rank)})) {
        return true;
      }
    }
    return false;
  } catch (const std::exception&) {  // who served it has ended, or died
    return true;
  }
}
}  // namespace

HostGroup::Watch watch_by(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix,
                          int rank, int world_size, std::function<void()> lost) {
  HostGroup::Watch watch;
  watch.leaves = [store, place = place_of_leaving(prefix, rank)] {
    try {
      store->set(place, std::string("1"));
    } catch (const std::exception&) {  // who served it has ended
    }
  };
  watch.lost = [store, prefix, rank, world_size, lost = std::move(lost)] {
    if (!has_any_left(*store, prefix, rank, world_size)) {
      lost();
    }
  };
  return watch;
}

}  // namespace brimful
