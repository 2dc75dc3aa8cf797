#include "settings.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace sim {
namespace {

std::atomic<bool> chosen = false;

long variable(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atol(text);
}

Unknown read_unknown_word() {
  const char* given = std::getenv("SIM_CUDA_UNKNOWN");
  const std::string_view word = given == nullptr ? "" : given;
  if (word.empty()) {
    return Unknown::unset;
  }
  if (word != "least" && word != "most") {
    std::fprintf(stderr,
                 "simulated CUDA: a figure that is not known has no such value (SIM_CUDA_UNKNOWN: "
                 "%s): use least or most\n",
                 given);
    std::_Exit(2);
  }
  return word == "most" ? Unknown::most : Unknown::least;
}

Settings read_settings() {
  Settings all{
      .devices = static_cast<int>(variable("SIM_CUDA_DEVICES", 2)),
      .total_bytes = static_cast<size_t>(variable("SIM_CUDA_MEMORY_MB", 256)) << 20,
      .arithmetic = variable("SIM_CUDA_ARITHMETIC", 1) != 0,
      .operators = false,
      .model = std::nullopt,
      .known_bytes = 0,
      .unknown = read_unknown_word(),
  };
  if (!all.arithmetic) {
    all.known_bytes = static_cast<size_t>(std::max(0L, variable("SIM_CUDA_KNOWN_MB", 16))) << 20;
  }
  all.operators = all.arithmetic && variable("SIM_CUDA_NO_OPERATORS", 0) == 0;
  const char* device = std::getenv("SIM_CUDA_DEVICE");
  if (device == nullptr || *device == 0) {
    return all;
  }
  if (all.arithmetic) {
    std::fprintf(stderr,
                 "simulated CUDA: SIM_CUDA_DEVICE is for a device without arithmetic "
                 "(SIM_CUDA_DEVICE: %s): set SIM_CUDA_ARITHMETIC=0\n",
                 device);
    std::_Exit(2);
  }
  all.model = read_device_model(device);
  if (std::getenv("SIM_CUDA_MEMORY_MB") == nullptr) {
    all.total_bytes = all.model->total_bytes;
  }
  return all;
}

// As the real runtime, it takes the numbers up to the first that names no device.
std::vector<int> read_visible_devices() {
  const int machine = settings().devices;
  std::vector<int> found;
  const char* at = std::getenv("CUDA_VISIBLE_DEVICES");
  if (at == nullptr) {
    for (int i = 0; i < machine; ++i) {
      found.push_back(i);
    }
    return found;
  }
  while (*at != 0) {
    char* end = nullptr;
    const long number = std::strtol(at, &end, 10);
    if (end == at || number < 0 || number >= machine) {
      break;
    }
    found.push_back(static_cast<int>(number));
    if (*end != ',') {
      break;
    }
    at = end + 1;
  }
  return found;
}

}  // namespace

const Settings& settings() {
  static const auto* all =
      new Settings(read_settings());  // static destructors of others still call in
  return *all;
}

std::atomic<long>& delay_us() {
  static std::atomic<long> now = variable("SIM_CUDA_DELAY_US", -1);
  return now;
}

std::atomic<bool>& strict() {
  static std::atomic<bool> now = variable("SIM_CUDA_STRICT", 0) != 0;
  return now;
}

const std::vector<int>& visible_devices() {
  static const auto* found = [] {
    chosen = true;
    return new std::vector<int>(read_visible_devices());
  }();
  return *found;
}

bool devices_are_chosen() {
  return chosen;
}

}  // namespace sim
