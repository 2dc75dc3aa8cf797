// Devices as data.
#include "device_model.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

namespace sim {
namespace {

struct Named {
  const char* key;
  DeviceModel model;
};

const std::vector<Named>& named() {
  static const auto* all = new std::vector<Named>{
#define SIM_DEVICE(key, name, bytes, source, multiprocessors, major, minor, l2) \
  {key, {name, bytes, multiprocessors, major, minor, l2}},
#include "device_models.inc"
#undef SIM_DEVICE
  };
  return *all;
}

[[noreturn]] void refuse(const char* text) {
  std::string keys;
  for (const Named& known : named()) {
    keys += std::string(keys.empty() ? "" : ", ") + known.key;
  }
  std::fprintf(
      stderr,
      "simulated CUDA: SIM_CUDA_DEVICE names no device (SIM_CUDA_DEVICE: %s): use one of "
      "%s, or memory with multiprocessors and compute capability, as 24GiB,sms=82,cc=8.9\n",
      text, keys.c_str());
  std::_Exit(2);
}

/// Takes a number from the front of the text.
template <typename T>
bool take_number(std::string_view* text, T* value) {
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), *value);
  text->remove_prefix(end - text->data());
  return error == std::errc();
}

/// Takes a word from the front of the text.
bool take_word(std::string_view* text, std::string_view word) {
  const bool is_there = text->substr(0, word.size()) == word;
  text->remove_prefix(is_there ? word.size() : 0);
  return is_there;
}

/// Memory, multiprocessors or compute capability; returns whether the text gives one of them, and nothing else.
bool parse_part(std::string_view text, DeviceModel* model) {
  if (take_word(&text, "sms=")) {
    return take_number(&text, &model->multiprocessors) && text.empty();
  }
  if (take_word(&text, "cc=")) {
    return take_number(&text, &model->major) && take_word(&text, ".") &&
           take_number(&text, &model->minor) && text.empty();
  }
  constexpr double kMost =
      1 << 20;  // with either unit far beyond what there is; infinity is not below it
  double size = 0;
  if (!take_number(&text, &size) || !(size > 0 && size < kMost) ||
      (text != "GiB" && text != "MiB")) {
    return false;
  }
  model->total_bytes = static_cast<size_t>(size * (text == "GiB" ? 1 << 30 : 1 << 20));
  return true;
}

/// Returns whether the text gives all three.
bool parse(std::string_view text, DeviceModel* model) {
  *model = {"Simulated GPU", 0, 0, 0, 0, 40};
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    if (!parse_part(text.substr(begin, end - begin), model)) {
      return false;
    }
    begin = end + 1;
  }
  return model->total_bytes > 0 && model->multiprocessors > 0 && model->major > 0;
}

struct Limits {
  int capability;  // from this one on
  int threads, blocks;
  int shared_kib;  // of a multiprocessor; a block may have 1 KiB less, but all of it before 8.0
};

// CUDA's programming guide, "Compute Capabilities".
constexpr Limits kLimits[] = {{75, 1024, 16, 64},   {80, 2048, 32, 164}, {86, 1536, 16, 100},
                              {87, 2048, 16, 164},  {89, 1536, 24, 100}, {90, 2048, 32, 228},
                              {100, 2048, 32, 228}, {120, 1536, 24, 100}};

// The architectures of torch's builds for CUDA 13 on Linux x86-64.
constexpr int kBuilt[] = {75, 80, 86, 90, 100, 120};

/// The last one that is not above the device's compute capability.
template <class Row, size_t n, class Capability>
const Row& last_not_above(const Row (&rows)[n], int capability, Capability of) {
  const Row* found = &rows[0];
  for (const Row& row : rows) {
    if (of(row) <= capability) {
      found = &row;
    }
  }
  return *found;
}

}  // namespace

DeviceModel read_device_model(const char* text) {
  for (const Named& known : named()) {
    if (std::strcmp(known.key, text) == 0) {
      return known.model;
    }
  }
  DeviceModel found;
  if (!parse(text, &found)) {
    refuse(text);
  }
  return found;
}

void describe(const DeviceModel& model, cudaDeviceProp* properties) {
  cudaDeviceProp& p = *properties;
  const Limits& limits = last_not_above(kLimits, 10 * model.major + model.minor,
                                        [](const Limits& row) { return row.capability; });
  const size_t shared = static_cast<size_t>(limits.shared_kib) << 10;
  std::snprintf(p.name, sizeof(p.name), "%s", model.name.c_str());
  p.totalGlobalMem = model.total_bytes;
  p.major = model.major;
  p.minor = model.minor;
  p.multiProcessorCount = model.multiprocessors;
  p.l2CacheSize = model.l2_mib << 20;
  p.maxThreadsPerMultiProcessor = limits.threads;
  p.maxBlocksPerMultiProcessor = limits.blocks;
  p.sharedMemPerMultiprocessor = shared;
  p.reservedSharedMemPerBlock = model.major >= 8 ? 1 << 10 : 0;
  p.sharedMemPerBlockOptin = shared - p.reservedSharedMemPerBlock;
  p.cooperativeLaunch = 1;
}

int blocks_at_once(const cudaDeviceProp& p, int threads, size_t shared_bytes) {
  constexpr int kRegisters = 32;
  const int warps = (threads + p.warpSize - 1) / p.warpSize;
  if (warps == 0) {
    return 0;
  }
  const int whole = warps * p.warpSize;
  int blocks = std::min({p.maxBlocksPerMultiProcessor, p.maxThreadsPerMultiProcessor / whole,
                         p.regsPerMultiprocessor / (whole * kRegisters)});
  const size_t shared = shared_bytes + p.reservedSharedMemPerBlock;
  if (shared > 0) {
    blocks = std::min(blocks, static_cast<int>(p.sharedMemPerMultiprocessor / shared));
  }
  return blocks;
}

int architecture_of_kernels(const cudaDeviceProp& p) {
  return last_not_above(kBuilt, 10 * p.major + p.minor, [](int built) { return built; });
}

}  // namespace sim
