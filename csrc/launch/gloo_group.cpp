#include "launch/gloo_group.h"

#include <c10/util/Exception.h>

#ifdef BRIMFUL_USE_GLOO
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#endif

namespace brimful::launch {

#ifdef BRIMFUL_USE_GLOO
namespace {

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
  const auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, world_size,
                                                                   gloo_options(device, timeout));
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
