#include <torch/nn/modules/linear.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "support/catch.h"
#include "support/checks.h"
#include "support/gpu.h"
#include "support/net.h"
#include "support/watchdog.h"

#include <brimful/error.h>
#include <brimful/launch/checkpoint.h>
#include <brimful/launch/run_ranks.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include <sys/resource.h>

namespace test_checkpoint {

namespace fs = std::filesystem;
using namespace brimful::test;
using brimful::RankFailed;
using brimful::RankOutOfMemory;
using brimful::RanksOptions;
using brimful::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

namespace {

const c10::Device kCpu(c10::DeviceType::CPU);

class TempFolder {
 public:
  TempFolder() {
    std::string name = fs::temp_directory_path() / "brimful_XXXXXX";
    path_ = mkdtemp(name.data());
  }
  ~TempFolder() { fs::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  std::string file(const std::string& name) const { return path_ / name; }
  size_t files() const {
    return std::distance(fs::directory_iterator(path_), fs::directory_iterator());
  }

 private:
  fs::path path_;
};

/// No file grows beyond `bytes` meanwhile, as on a full disk: a write fails in the middle.
class FileLimit {
 public:
  explicit FileLimit(rlim_t bytes) {
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileLimit(const FileLimit&) = delete;
  FileLimit& operator=(const FileLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int) = nullptr;
};

/// A value that fails to be saved or loaded.
struct Failing {
  std::function<void()> fail;
};
torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const Failing& value) {
  value.fail();
  return archive;
}
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           Failing& value) {
  value.fail();
  return archive;
}

at::Tensor loaded(const std::string& path) {
  at::Tensor tensor;
  torch::load(tensor, path);
  return tensor;
}

}  // namespace

TEST_CASE("rank 0 saves a module and every rank loads it", "[launch]") {
  const Watchdog watchdog("save and load");
  const TempFolder folder;
  const auto path = folder.file("model.pt");
  RanksOptions options;
  options.world_size = GENERATE(1, 3);
  Checks checks;
  run_ranks(options, [&](int rank, const Group& group) {
    const auto module = std::make_shared<torch::nn::LinearImpl>(3, 2);
    const at::NoGradGuard no_grad;
    module->weight.fill_(rank + 1);
    brimful::save_on_rank0(group, path, module);
    checks.expect(fs::exists(path), "the file is there when a rank has returned");
    brimful::load(group, path, module, kCpu);
    checks.expect(module->weight.eq(1).all().item<bool>(), "the values are rank 0's");
    const auto numbers = std::vector<at::Tensor>{at::arange(3), at::ones({2})};
    brimful::save_on_rank0(group, path, numbers);
    std::vector<at::Tensor> read;
    brimful::load(group, path, read, kCpu);
    checks.expect(same_bits(read, numbers), "a list of tensors, in the place of the module");
  });
  CHECK(checks.failures().empty());
  CHECK(folder.files() == 1);
}

TEST_CASE("a process without a group saves and loads alone", "[launch]") {
  const TempFolder folder;
  const auto path = folder.file("alone.pt");
  brimful::save_on_rank0(Group(), path, at::arange(4));
  at::Tensor read;
  brimful::load(Group(), path, read, kCpu);
  CHECK(at::equal(read, at::arange(4)));
  const auto missing = folder.file("no/alone.pt");
  CHECK_THROWS_AS(brimful::save_on_rank0(Group(), missing, read), std::system_error);
  CHECK_THROWS_AS(brimful::load(Group(), missing, read, kCpu), c10::Error);
}

TEST_CASE("wherever rank 0 fails to save, all ranks raise and the old file stays", "[launch]") {
  const Watchdog watchdog("save fails");
  const TempFolder folder;
  const auto path = folder.file("old.pt");
  const auto old = at::arange(5);
  brimful::save_on_rank0(Group(), path, old);
  Checks checks;

  // Runs one save on 2 ranks, in which rank 0 is to fail with `Error`, and then one that works.
  const auto check = [&](const std::string& point, auto expected, const std::string& to,
                         const auto& value, const std::string& words, bool memory = false) {
    using Error = decltype(expected);
    run_ranks(RanksOptions{}, [&](int rank, const Group& group) {
      try {
        brimful::save_on_rank0(group, to, value);
        checks.expect(false, point + ": nothing was raised");
      } catch (const Error& e) {
        checks.expect(rank == 0, point + ": rank 0's error is raised on another");
        checks.expect(std::string(e.what()).find(words) != std::string::npos,
                      point + ": rank 0 said " + e.what());
      } catch (const RankFailed& e) {
        const std::string said = e.what_without_backtrace();
        checks.expect(rank == 1 && e.rank() == 0 && e.step() == -1, point + ": rank and step");
        checks.expect((dynamic_cast<const RankOutOfMemory*>(&e) != nullptr) == memory,
                      point + ": kind of the failure");
        checks.expect(
            said.rfind("rank 0 could not save a checkpoint (path: " + to + "): ", 0) == 0 &&
                said.find(words) != std::string::npos,
            point + ": rank 1 said " + said);
      }
      const auto next = folder.file("next.pt");
      brimful::save_on_rank0(group, next, old + 1);
      checks.expect(at::equal(loaded(next), old + 1), point + ": the next save");
    });
    checks.expect(at::equal(loaded(path), old), point + ": the old file");
    for (const auto& file : fs::directory_iterator(folder.file(""))) {
      checks.expect(file.path().extension() != ".partial", point + ": the partial file is left");
    }
  };
  const std::system_error os(0, std::generic_category());

  check("no folder", os, folder.file("no/such.pt"), old, "No such file or directory");
  check("folder", os, folder.file(""), old, "names a folder");
  {
    const FileLimit limit(64 << 10);
    check("write", os, path, at::zeros({1 << 20}), "cannot write");
  }
  fs::create_directories(folder.file("folder/in/it"));
  check("a folder", os, folder.file("folder"), old, "this is a folder");
  CHECK(fs::exists(folder.file("folder/in/it")));
  check("value", std::runtime_error(""), path, Failing{[] { throw std::runtime_error("planted"); }},
        "planted");
  check("memory", c10::OutOfMemoryError({}, ""), path,
        Failing{[] { TORCH_CHECK_WITH(OutOfMemoryError, false, "planted"); }}, "planted", true);
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("the lowest rank that fails to load is named on all others", "[launch]") {
  const Watchdog watchdog("load fails");
  const TempFolder folder;
  const auto path = folder.file("value.pt");
  Checks checks;
  RanksOptions options;
  options.world_size = 3;
  run_ranks(options, [&](int rank, const Group& group) {
    brimful::save_on_rank0(group, path, at::ones({2}));
    try {
      if (rank == 0) {
        at::Tensor value;
        brimful::load(group, path, value, kCpu);
      } else {
        Failing value{[&] { throw std::runtime_error("planted " + std::to_string(rank)); }};
        brimful::load(group, path, value, kCpu);
      }
      checks.expect(false, "nothing was raised");
    } catch (const std::runtime_error& e) {
      checks.expect(e.what() == "planted " + std::to_string(rank), "its own error");
    } catch (const RankFailed& e) {
      checks.expect(rank == 0 && e.rank() == 1, "who failed");
      checks.expect(std::string(e.what_without_backtrace()).find("planted 1") != std::string::npos,
                    "the words");
    }
    group->barrier()->wait();
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("ranks that do not come to save are named by the others", "[launch]") {
  const Watchdog watchdog("missing ranks");
  const TempFolder folder;
  const auto path = folder.file("value.pt");
  const int missing = GENERATE(0, 2);
  Checks checks;
  RanksOptions options;
  options.world_size = 3;
  options.timeout = std::chrono::milliseconds(300);
  run_ranks(options, [&](int rank, const Group& group) {
    if (rank == missing) {
      return;
    }
    try {
      brimful::save_on_rank0(group, path, at::ones({2}));
      checks.expect(false, "nothing was raised");
    } catch (const RankFailed& e) {
      const std::string said = e.what_without_backtrace();
      const auto expected = "not all ranks came to save a checkpoint (path: " + path +
                            ") (missing: rank " + std::to_string(missing) + "; timeout_ms: 300)";
      checks.expect(e.rank() == missing && said.rfind(expected, 0) == 0, said);
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("saves leave no more in the store, however many", "[launch]") {
  const Watchdog watchdog("keys of saves");
  const TempFolder folder;
  std::vector<int64_t> keys;
  run_ranks(RanksOptions{}, [&](int rank, const Group& group) {
    for (int save = 0; save < 6; ++save) {
      brimful::save_on_rank0(group, folder.file("value.pt"), at::ones({2}));
      group->barrier()->wait();
      if (rank == 0) {
        keys.push_back(group->getStore()->getNumKeys());
      }
      group->barrier()->wait();
    }
  });
  CHECK(keys[5] == keys[1]);
}

TEST_CASE("a checkpoint is loaded to the rank's own device", "[launch][gpu]") {
  BRIMFUL_NEEDS_GPUS(1);
  const TempFolder folder;
  const auto path = folder.file("value.pt");
  const c10::Device device(at::kCUDA, brimful::launch::nccl_device_count() - 1);
  brimful::save_on_rank0(Group(), path, at::ones({2}, at::kCUDA));
  at::Tensor value;
  brimful::load(Group(), path, value, device);
  CHECK(value.device() == device);
}

}  // namespace test_checkpoint
