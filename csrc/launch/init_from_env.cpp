#include <brimful/launch/init_from_env.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
#include <charconv>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "base/environment.h"
#include "launch/gloo_group.h"
#include "launch/nccl_group.h"

namespace brimful {
namespace {

constexpr const char* kRemedy =
    "; start the program with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and "
    "LOCAL_RANK where there are CUDA devices";

struct Environment {
  int rank;
  int world_size;
  std::string master_addr;
  uint16_t master_port;
  bool agent_serves_store;
  std::string attempt;  // torchrun keeps its store when it starts the ranks again
};

std::string read_text(const char* name) {
  auto value = environment(name);
  TORCH_CHECK_VALUE(!value.empty(), "an environment variable is not set (name: ", name, ")",
                    kRemedy);
  return value;
}

int read_number(const char* name, int low, int high) {
  const std::string text = read_text(name);
  int number = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool is_number = status == std::errc() && end == text.data() + text.size();
  TORCH_CHECK_VALUE(is_number, "an environment variable is not a whole number (", name, ": ", text,
                    ")", kRemedy);
  TORCH_CHECK_VALUE(number >= low && number <= high, "an environment variable is out of range (",
                    name, ": ", number, "; range: ", low, " to ", high, ")", kRemedy);
  return number;
}

Environment read_environment() {
  constexpr int kMaxInt = std::numeric_limits<int>::max();
  Environment env;
  env.rank = read_number("RANK", 0, kMaxInt);
  env.world_size = read_number("WORLD_SIZE", 1, kMaxInt);
  TORCH_CHECK_VALUE(env.rank < env.world_size,
                    "the rank is not below the world size (RANK: ", env.rank,
                    ", WORLD_SIZE: ", env.world_size,
                    "); ranks count from 0, so give each process one of 0 to ", env.world_size - 1);
  env.master_addr = read_text("MASTER_ADDR");
  env.master_port =
      static_cast<uint16_t>(read_number("MASTER_PORT", 1, std::numeric_limits<uint16_t>::max()));
  env.agent_serves_store = environment("TORCHELASTIC_USE_AGENT_STORE") == "True";
  const auto attempt = environment("TORCHELASTIC_RESTART_COUNT");
  env.attempt = attempt.empty() ? "0" : attempt;
  return env;
}

c10::intrusive_ptr<c10d::Store> connect_store(const Environment& env,
                                              std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = env.master_port;
  options.isServer = !env.agent_serves_store && env.rank == 0;
  options.numWorkers = env.world_size;
  options.waitWorkers = false;
  options.timeout = timeout;
  options.multiTenant = true;  // a later group of this process uses the same port
  return c10::make_intrusive<c10d::TCPStore>(env.master_addr, options);
}

}  // namespace

std::optional<c10::Device> launch::device_from_env(int devices) {
  if (devices == 0) {
    return std::nullopt;
  }
  constexpr int kMaxIndex = std::numeric_limits<c10::DeviceIndex>::max();
  const int local_rank = read_number("LOCAL_RANK", 0, kMaxIndex);
  // Some launchers show each process its own device only.
  const int index = devices == 1 ? 0 : local_rank;
  TORCH_CHECK_VALUE(index < devices, "there are fewer CUDA devices than ranks on this host (",
                    "LOCAL_RANK: ", local_rank, ", devices: ", devices,
                    "); start one rank per device, or set CUDA_VISIBLE_DEVICES to nothing to "
                    "train on the CPU");
  return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
}

c10::intrusive_ptr<c10d::ProcessGroup> init_from_env(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0,
                    "the timeout must be positive (timeout_ms: ", timeout.count(), ")");
  const Environment env = read_environment();
  const auto device = launch::device_from_env(launch::nccl_device_count());
  // Beside torchrun's keys and torch's own ("default_pg"), and apart from earlier groups of this
  // process and of ranks that were here before a restart.
  static std::atomic<int> groups{0};
  const std::string prefix =
      "brimful/attempt_" + env.attempt + "/group_" + std::to_string(groups++);
  const auto store = c10::make_intrusive<c10d::PrefixStore>(prefix, connect_store(env, timeout));
  auto group = launch::make_gloo_group(store, env.rank, env.world_size, launch::GlooDevice::of_host,
                                       timeout);
  if (device) {
    launch::keep_process_on_nccl_errors();
    c10::impl::getDeviceGuardImpl(device->type())->setDevice(*device);
    launch::add_nccl(*group, store, env.rank, env.world_size, *device, timeout);
  }
  return group;
}

}  // namespace brimful
