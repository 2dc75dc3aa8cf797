#include "probes/gpu/reader.h"
#include <unistd.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include "base/environment.h"
#include "memory/cuda.h"
#include "probes/gpu/cuda_numbers.h"
#include "probes/gpu/numbers.h"

namespace brimful::probes {

using namespace nvml;

std::string GpuReader::start() {
  try {
    library_ = std::make_unique<Library>(path_);
  } catch (const std::exception& error) {
    return error.what();
  }
  const nvml::Status status = library_->call({"nvmlInit_v2", "nvmlInit"});
  if (status != kOk) {
    library_ = nullptr;
    return nvml::to_string(status);
  }
  return "";
}

GpuReport GpuReader::read_started(const GpuSurroundings& around) const {
  GpuReport report;
  std::array<char, kTextSize> driver{};
  if (library_->call("nvmlSystemGetDriverVersion", driver.data(), kTextSize) == kOk) {
    driver.back() = '\0';
    report.driver = driver.data();
  }
  uint32_t count = 0;
  const nvml::Status status =
      library_->call({"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"}, &count);
  if (status != kOk) {
    report.problem = nvml::to_string(status);
    return report;
  }
  for (uint32_t index = 0; index < count; ++index) {
    read_gpu(*library_, around, static_cast<int>(index), report.gpus);
  }
  report.problem =
      count == 0 ? "the driver has no GPU here" : number_as_cuda_does(around, report.gpus);
  return report;
}

GpuReport GpuReader::read(const GpuSurroundings& around) {
  const std::lock_guard lock(mutex_);
  GpuReport report;
  if (library_ == nullptr) {
    report.problem = start();
    if (library_ == nullptr) {
      return report;
    }
  }
  report = read_started(around);
  const bool away =
      report.gpus.empty() || std::all_of(report.gpus.begin(), report.gpus.end(),
                                         [](const Gpu& gpu) { return !gpu.problem.empty(); });
  if (away) {  // begin anew at the next reading: a driver may come back, and the library must not outlive it
    library_->call("nvmlShutdown");
    library_ = nullptr;
  }
  return report;
}

GpuSurroundings surroundings_now() {
  GpuSurroundings around;
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    around.visible_devices = visible;
  }
  around.device_order = environment("CUDA_DEVICE_ORDER");
  around.cuda_uuids = memory::cuda_uuids();
  return around;
}

GpuReport read_gpus() {
  struct Ours {
    pid_t pid;
    std::string library;
    GpuReader reader{library};
  };
  // Never destroyed: threads may read while the process ends. A child of fork gets one of its own.
  static std::atomic<Ours*> current{nullptr};
  Ours* ours = current.load();
  const char* given = std::getenv("BRIMFUL_NVML");
  const std::string library = given == nullptr ? "libnvidia-ml.so.1" : given;
  while (ours == nullptr || ours->pid != getpid() || ours->library != library) {
    auto* made = new Ours{getpid(), library};
    if (current.compare_exchange_strong(ours, made)) {
      ours = made;
    } else {
      delete made;
    }
  }
  return ours->reader.read(surroundings_now());
}

}  // namespace brimful::probes
