#include "launch/gloo_group.h"

#include <c10/util/Exception.h>

#include <string>
#include <vector>

#include "base/block_sigpipe.h"

#ifdef BRIMFUL_USE_GLOO
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#endif

namespace brimful::launch {

#ifdef BRIMFUL_USE_GLOO
namespace {

// Ranks that disagree on their number would wait for each other until the timeout. Each compares itself with rank 0 and
// leaves its own number only after it has read rank 0's, which may serve the store and goes away on an error.
void require_same_world_size(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                             int world_size) {
  const auto key = [](int of_rank) { return "world_size/" + std::to_string(of_rank); };
  const auto text = std::to_string(world_size);
  const std::vector<uint8_t> own(text.begin(), text.end());
  const auto require_same = [&](int other, const std::vector<uint8_t>& theirs) {
    TORCH_CHECK_VALUE(theirs == own, "ranks disagree on the world size (rank ", rank, ": ",
                      world_size, ", rank ", other, ": ", std::string(theirs.begin(), theirs.end()),
                      "); start all ranks with the same WORLD_SIZE");
  };
  if (rank == 0) {
    store->set(key(0), own);
    for (int other = 1; other < world_size; ++other) {
      require_same(other, store->get(key(other)));
    }
    return;
  }
  const auto of_rank_0 = store->get(key(0));
  store->set(key(rank), own);
  require_same(0, of_rank_0);
}

c10::intrusive_ptr<c10d::ProcessGroupGloo::Options> gloo_options(
    GlooDevice device, std::chrono::milliseconds timeout) {
  using Gloo = c10d::ProcessGroupGloo;
  if (device == GlooDevice::of_host) {
    return Gloo::Options::create_default(timeout);  // GLOO_SOCKET_IFNAME, the host's name, loopback
  }
  auto options = Gloo::Options::create(timeout);
  options->devices.push_back(Gloo::createDeviceForHostname("127.0.0.1"));
  return options;
}

}  // namespace

c10::intrusive_ptr<c10d::ProcessGroup> make_gloo_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                       int rank, int world_size, GlooDevice device,
                                                       std::chrono::milliseconds timeout) {
  constexpr auto kGloo = c10d::ProcessGroup::BackendType::GLOO;
  require_same_world_size(store, rank, world_size);
  const auto backend = [&] {
    const BlockSigpipe inherited;
    return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, world_size,
                                                       gloo_options(device, timeout));
  }();
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, world_size);
  group->setDefaultBackend(kGloo);
  group->setBackend(c10::DeviceType::CPU, kGloo, backend);
  group->setBackend(c10::DeviceType::CUDA, kGloo, backend);
  return group;
}
#else
c10::intrusive_ptr<c10d::ProcessGroup> make_gloo_group(
    const c10::intrusive_ptr<c10d::Store>& /*store*/, int /*rank*/, int /*world_size*/,
    GlooDevice /*device*/, std::chrono::milliseconds /*timeout*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "brimful was built without gloo: install gloo's headers (Debian: libgloo-dev) and rebuild, "
      "or pass a process group of your own");
}
#endif

}  // namespace brimful::launch
