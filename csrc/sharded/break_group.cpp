#include "sharded/break_group.h"

#include <ATen/ATen.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>

#include <chrono>
#include <string>
#include <vector>

namespace brimful {
namespace {
constexpr int kTag = 0x62726b;
constexpr std::chrono::milliseconds kAtOnce{1};

/// Abort() of gloo ends nothing that waits. A message that is late closes its connection, on both sides.
void close_connections(c10d::Backend& gloo) {
  for (int peer = 0; peer < gloo.getSize(); ++peer) {
    if (peer == gloo.getRank()) {
      continue;
    }
    try {
      std::vector<at::Tensor> never{at::empty({1}, at::kByte)};
      gloo.recv(never, peer, kTag)->wait(kAtOnce);
    } catch (const std::exception&) {  // as it should
    }
  }
}

c10::intrusive_ptr<c10d::Backend> backend_of(c10d::ProcessGroup& group, c10::DeviceType type) {
  try {
    return group.getBackend(type);
  } catch (const std::exception&) {  // it has none
    return nullptr;
  }
}
}  // namespace

void break_group(c10d::ProcessGroup& group) noexcept {
  try {
    const memory::UnlimitedEverywhere unlimited;
    const auto on_cpu = backend_of(group, c10::DeviceType::CPU);
    if (on_cpu && on_cpu->getBackendName() == "gloo") {
      close_connections(*on_cpu);
    }
    const auto on_device = backend_of(group, c10::DeviceType::CUDA);
    if (on_device && on_device->getBackendName() != "gloo") {
      on_device->abort();
    }
  } catch (const std::exception& e) {
    try {
      log(LogLevel::warning, std::string("could not abort a group of the model: ") + e.what());
    } catch (...) {  // a sink that fails
    }
  } catch (...) {
  }
}

}  // namespace brimful
