// Which cuDNN this is said to be: the one that the installed torch came with, for torch refuses an older one and decides by
// its version what to ask. Its wheel's folder has the version in its name.
#include "version.h"

#include <dirent.h>
#include <link.h>

#include <cstdio>
#include <string>

namespace sim {
namespace {

constexpr int kOtherwise = 91900;  // of torch 2.11

/// The folder of the installed packages, from where torch's library was loaded.
int note_packages(dl_phdr_info* library, size_t /*bytes*/, void* found) {
  const std::string path = library->dlpi_name;
  const auto at = path.rfind("/torch/lib/libtorch_cuda.so");
  if (at == std::string::npos) {
    return 0;
  }
  *static_cast<std::string*>(found) = path.substr(0, at);
  return 1;
}

int read_version() {
  std::string packages;
  dl_iterate_phdr(&note_packages, &packages);
  // Not by std::filesystem, whose functions torch 2.11 exports too.
  DIR* const entries = opendir(packages.c_str());
  int version = kOtherwise;
  while (const auto* entry = entries != nullptr ? readdir(entries) : nullptr) {
    int cuda = 0, major = 0, minor = 0, patch = 0;
    if (std::sscanf(entry->d_name, "nvidia_cudnn_cu%d-%d.%d.%d", &cuda, &major, &minor, &patch) ==
        4) {
      version = major * 10000 + minor * 100 + patch;
    }
  }
  if (entries != nullptr) {
    closedir(entries);
  }
  return version;
}

}  // namespace

int cudnn_version() {
  static const int version = read_version();
  return version;
}

}  // namespace sim
