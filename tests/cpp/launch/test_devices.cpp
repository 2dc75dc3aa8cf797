// Ranks on devices, and what can be said of NCCL where there is no GPU.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include "launch/nccl_group.h"
#include "support/catch.h"
#include "support/checks.h"
#include "support/gpu.h"
#include "support/net.h"
#include "support/scoped_env.h"
#include "support/watchdog.h"

#include <brimful/launch/init_from_env.h>
#include <brimful/launch/run_ranks.h>
#include <brimful/reducer/distributed_data_parallel.h>

#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace test_devices {

using namespace brimful::test;
using brimful::run_ranks;
using brimful::launch::device_from_env;
using brimful::launch::nccl_device_count;
using Variables = std::map<std::string, const char*>;
using Devices = std::vector<c10::Device>;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

namespace {

const c10::Device kCpu(c10::DeviceType::CPU);
c10::Device cuda(int index) {
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)};
}

void do_nothing(int /*rank*/, c10::Device /*device*/, const Group& /*group*/) {}

at::Tensor sum_over_ranks(const Group& group, const at::Tensor& value) {
  std::vector<at::Tensor> tensors{value};
  group->allreduce(tensors)->wait();
  return tensors[0];
}

}  // namespace

TEST_CASE("run_ranks runs one rank per device", "[launch]") {
  const Watchdog watchdog("one rank per device");
  Checks checks;
  run_ranks(Devices(3, kCpu), [&](int rank, c10::Device device, const Group& group) {
    checks.expect(device == kCpu, "its device");
    checks.expect(group->getRank() == rank && group->getSize() == 3, "its place in the group");
    const auto sum = sum_over_ranks(group, at::full({2}, rank + 1, device));
    checks.expect(sum[1].item<int64_t>() == 6, "the sum over ranks");
  });
  CHECK(checks.failures().empty());
}

TEST_CASE("run_ranks refuses devices that cannot make a group", "[launch]") {
  struct Case {
    Devices devices;
    const char* message;
  };
  const auto meta = c10::Device(c10::DeviceType::Meta);
  const auto bad = GENERATE_COPY(
      Case{{}, "need at least one rank (devices: none)"},
      Case{{meta}, "on the CPU or on a CUDA device (device: meta)"},
      Case{{kCpu, cuda(0)}, "all on the CPU or all on CUDA devices (devices: cpu, cuda:0)"},
      Case{{cuda(0), kCpu}, "all on the CPU or all on CUDA devices (devices: cuda:0, cpu)"},
      Case{{cuda(1), cuda(0), cuda(1)}, "one rank per CUDA device (named twice: cuda:1)"},
      Case{{cuda(120)}, "device: cuda:120"});
  CHECK_THROWS_AS(run_ranks(bad.devices, do_nothing), c10::ValueError);
  CHECK_THROWS_WITH(run_ranks(bad.devices, do_nothing), Catch::Contains(bad.message));
}

TEST_CASE("run_ranks over devices refuses an empty function and no timeout", "[launch]") {
  CHECK_THROWS_AS(run_ranks({kCpu}, brimful::DeviceRankFn()), c10::ValueError);
  CHECK_THROWS_AS(run_ranks({kCpu}, do_nothing, std::chrono::milliseconds(0)), c10::ValueError);
}

TEST_CASE("every rank has an intra-op team of the size that was set before", "[launch]") {
  const Watchdog watchdog("intra-op threads");
  const int before = at::get_num_threads();
  const int wanted = GENERATE(1, 3);
  at::set_num_threads(wanted);
  std::vector<int> seen(2);
  run_ranks(Devices(2, kCpu), [&](int rank, c10::Device /*device*/, const Group& /*group*/) {
    seen[rank] = at::get_num_threads();
  });
  at::set_num_threads(before);
  CHECK(seen == std::vector<int>(2, wanted));
}

TEST_CASE("a rank's device is that of LOCAL_RANK, or the only one", "[launch]") {
  const ScopedEnv env(Variables{{"LOCAL_RANK", "1"}});
  CHECK(device_from_env(0) == std::nullopt);
  CHECK(device_from_env(1) == cuda(0));
  CHECK(device_from_env(2) == cuda(1));
  CHECK(device_from_env(8) == cuda(1));
}

TEST_CASE("a LOCAL_RANK that names no device is refused", "[launch]") {
  struct Case {
    const char* value;
    const char* message;
  };
  const auto bad =
      GENERATE(Case{nullptr, "not set (name: LOCAL_RANK)"}, Case{"gpu", "whole number (LOCAL_RANK"},
               Case{"-1", "out of range (LOCAL_RANK: -1"},
               Case{"2", "fewer CUDA devices than ranks on this host (LOCAL_RANK: 2, devices: 2)"});
  const ScopedEnv env(Variables{{"LOCAL_RANK", bad.value}});
  CHECK_THROWS_AS(device_from_env(2), c10::ValueError);
  CHECK_THROWS_WITH(device_from_env(2), Catch::Contains(bad.message));
}

TEST_CASE("ranks that torchrun started again do not see the keys of those before", "[launch]") {
  const Watchdog watchdog("torchrun's restart");
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const auto port = std::to_string(agent->getPort());
  auto values = one_rank_world();
  values["MASTER_PORT"] = port.c_str();
  values["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  values["TORCHELASTIC_RESTART_COUNT"] = "7";
  const ScopedEnv env(values);
  const auto group = brimful::init_from_env(std::chrono::seconds(10));
  group->getStore()->set("key", "here");
  int found = 0;
  for (int number = 0; number < 100; ++number) {
    found += agent->check({"brimful/attempt_7/group_" + std::to_string(number) + "/key"}) ? 1 : 0;
  }
  CHECK(found == 1);
}

#ifdef BRIMFUL_USE_CUDA
TEST_CASE("NCCL is linked in, and says that there is no GPU", "[launch]") {
  if (nccl_device_count() > 0) {
    return;  // the tests below say more
  }
  const auto store = c10::make_intrusive<c10d::HashStore>();
  c10d::ProcessGroup group(store, 0, 1);
  const auto add = [&] {
    brimful::launch::add_nccl(group, store, 0, 1, cuda(0), std::chrono::seconds(1));
  };
  CHECK_THROWS_WITH(add(), Catch::Contains("no GPUs found"));
}
#endif

TEST_CASE("ranks on CUDA devices reduce over NCCL, and CPU tensors over gloo", "[launch][gpu]") {
  BRIMFUL_NEEDS_GPUS(1);
  const Watchdog watchdog("ranks on CUDA devices", std::chrono::seconds(100));
  Devices devices;
  for (int index = 0; index < nccl_device_count(); ++index) {
    devices.push_back(cuda(index));
  }
  const auto size = static_cast<int64_t>(devices.size());
  Checks checks;
  run_ranks(devices, [&](int rank, c10::Device device, const Group& group) {
    const auto own = at::full({2}, rank + 1, at::kCUDA);
    checks.expect(device == devices[rank] && own.device() == device, "its current device");
    checks.expect(group->getBoundDeviceId() == device, "the group's device");
    checks.expect(group->getBackend(at::kCUDA)->getBackendName() == "nccl", "NCCL");
    checks.expect(group->getBackend(at::kCPU)->getBackendName() == "gloo", "gloo");
    const auto expected = size * (size + 1) / 2;
    checks.expect(sum_over_ranks(group, own)[1].item<int64_t>() == expected, "sum on the device");
    const auto on_cpu = at::full({2}, rank + 1, at::kLong);
    checks.expect(sum_over_ranks(group, on_cpu)[1].item<int64_t>() == expected, "sum on the CPU");
  });
  CHECK(checks.failures().empty());
}

TEST_CASE("init_from_env gives NCCL on the rank's own device", "[launch][gpu]") {
  BRIMFUL_NEEDS_GPUS(1);
  const Watchdog watchdog("init_from_env with NCCL", std::chrono::seconds(100));
  const ScopedEnv env(one_rank_world());
  const auto group = brimful::init_from_env(std::chrono::seconds(60));
  CHECK(group->getBoundDeviceId() == cuda(0));
  CHECK(sum_over_ranks(group, at::full({2}, 4, at::kCUDA))[0].item<int64_t>() == 4);
  CHECK(sum_over_ranks(group, at::full({2}, 5))[0].item<int64_t>() == 5);
}

TEST_CASE("a rank that throws ends the others' wait in NCCL", "[launch][gpu]") {
  BRIMFUL_NEEDS_GPUS(2);
  const Watchdog watchdog("a rank throws under NCCL", std::chrono::seconds(100));
  const auto run = [] {
    run_ranks({cuda(0), cuda(1)}, [](int rank, c10::Device /*device*/, const Group& group) {
      sum_over_ranks(group, at::ones({2}, at::kCUDA)).cpu();
      TORCH_CHECK(rank == 0, "planted on one rank");
      sum_over_ranks(group, at::ones({2}, at::kCUDA)).cpu();
    });
  };
  CHECK_THROWS_WITH(run(), Catch::Contains("planted on one rank"));
}

TEST_CASE("a collective over NCCL that a rank never joins ends no process", "[launch][gpu]") {
  BRIMFUL_NEEDS_GPUS(2);
  const Watchdog watchdog("a rank stays away under NCCL", std::chrono::seconds(100));
  const ScopedEnv env(Variables{{"TORCH_NCCL_ASYNC_ERROR_HANDLING", nullptr},
                                {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "100"}});
  std::atomic<bool> ended = false;
  const auto stays_away = [&](int rank, c10::Device /*device*/, const Group& group) {
    sum_over_ranks(group, at::ones({2}, at::kCUDA)).cpu();
    while (rank == 1 && !ended) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    if (rank == 0) {
      sum_over_ranks(group, at::ones({2}, at::kCUDA)).cpu();  // torch's watchdog aborts it
      ended = true;
    }
  };
  run_ranks({cuda(0), cuda(1)}, stays_away, std::chrono::seconds(2));
  CHECK(ended);
}

}  // namespace test_devices
