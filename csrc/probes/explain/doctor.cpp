#include <brimful/memory/system_limit.h>
#include <brimful/probes/doctor.h>
#include <brimful/probes/processes.h>
#include <brimful/version.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <cstdlib>
#include "base/environment.h"
#include "base/format.h"

namespace brimful::probes {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

bool is_free(int64_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    return false;
  }
  const int reuse = 1;  // as torch's store does: a port that a job has just left is free
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  address.sin_port = htons(static_cast<uint16_t>(port));
  const bool bound =
      bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 && listen(fd, 1) == 0;
  close(fd);
  return bound;
}

Finding memory_finding(const LimitFacts& facts) {
  if (!facts.memory_bytes) {
    return {"host memory", Health::warn, "unknown", "give memory.set_limit a number of bytes"};
  }
  const auto found =
      format_bytes(*facts.memory_bytes) + " for tensors (" + facts.memory_where + ")";
  if (*facts.memory_bytes < kGiB) {
    return {"host memory", Health::warn, found, "give the container or the job more memory"};
  }
  return {"host memory", Health::ok,
          found + (facts.memory_limited ? "; memory.set_limit('cpu', 'auto') keeps to it" : ""),
          ""};
}

Finding shm_finding(const LimitFacts& facts) {
  const char* remedy = "start the container with --ipc=host or --shm-size=8g";
  if (!facts.shm_total_bytes) {
    return {"/dev/shm", Health::fail, "absent: DataLoader workers cannot pass batches", remedy};
  }
  const auto found = format_bytes(facts.shm_free_bytes.value_or(0)) + " free of " +
                     format_bytes(*facts.shm_total_bytes);
  const bool enough = facts.shm_free_bytes.value_or(0) >= kGiB;
  return {
      "/dev/shm", enough ? Health::ok : Health::warn, found,
      enough ? "" : std::string("too little for DataLoader workers with large batches; ") + remedy};
}

Finding count_finding(const char* name, const std::optional<int64_t>& limit, int64_t enough,
                      const char* remedy) {
  const auto found = limit ? std::to_string(*limit) : std::string("unlimited");
  const bool fine = !limit || *limit >= enough;
  return {name, fine ? Health::ok : Health::warn, found, fine ? "" : remedy};
}

Finding port_finding(const LimitFacts& facts) {
  const auto name = "port " + std::to_string(facts.port);
  if (facts.port <= 0 || facts.port > 65535) {
    return {name, Health::fail, "no such port", "set MASTER_PORT to a number from 1024 to 65535"};
  }
  if (facts.port_is_free) {
    return {name, Health::ok, "free", ""};
  }
  return {name, Health::warn, "in use, or this process may not open it",
          "another job may be running here: use torchrun --standalone, or another --master-port"};
}

}  // namespace

const char* name_of(Health health) {
  return health == Health::ok ? "ok" : health == Health::warn ? "warn" : "fail";
}

BuildFacts build_facts() {
  BuildFacts facts;
  facts.version = BRIMFUL_VERSION;
#ifdef BRIMFUL_USE_CUDA
  facts.cuda = facts.nccl = true;
#endif
#ifdef BRIMFUL_USE_GLOO
  facts.gloo = true;
#endif
  return facts;
}

Finding check_build(const BuildFacts& facts, bool wanted) {
  const auto answer = [](bool built) { return built ? "yes" : "no"; };
  Finding finding{"brimful", Health::ok,
                  facts.version + ", built with CUDA: " + answer(facts.cuda) +
                      ", NCCL: " + answer(facts.nccl) + ", gloo: " + answer(facts.gloo),
                  ""};
  if (wanted && !(facts.cuda && facts.nccl)) {
    finding.health = Health::warn;
    finding.remedy =
        "build brimful again with BRIMFUL_CUDA=ON, which names what the build lacks: this one is "
        "for the CPU alone";
  } else if (!facts.gloo) {
    finding.health = Health::warn;
    finding.remedy =
        "install gloo's headers (Debian: libgloo-dev) and build brimful again: this one makes no "
        "process groups over gloo";
  }
  return finding;
}

LimitFacts limits_now() {
  LimitFacts facts;
  try {
    const auto limit = memory::system_limit();
    facts.memory_bytes = limit.limit_bytes;
    facts.memory_where = limit.where;
    facts.memory_limited = limit.source != memory::LimitSource::available;
  } catch (const std::exception&) {  // nothing states it
  }
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) == 0) {
    const auto block = static_cast<int64_t>(shm.f_frsize);
    facts.shm_total_bytes = static_cast<int64_t>(shm.f_blocks) * block;
    facts.shm_free_bytes = static_cast<int64_t>(shm.f_bavail) * block;
  }
  facts.open_files = soft_limit(RLIMIT_NOFILE);
  facts.processes = soft_limit(RLIMIT_NPROC);
  facts.locked_bytes = soft_limit(RLIMIT_MEMLOCK);
  facts.cpus = usable_cpus();
  facts.port = environment_number("MASTER_PORT", 29500);
  facts.port_is_free = facts.port > 0 && facts.port <= 65535 && is_free(facts.port);
  return facts;
}

std::vector<Finding> check_limits(const LimitFacts& facts) {
  const auto tenths = static_cast<int64_t>(facts.cpus * 10);
  std::vector<Finding> findings{
      memory_finding(facts), shm_finding(facts),
      count_finding("open files", facts.open_files, 4096,
                    "ulimit -n 65536: each tensor that workers share may take a file"),
      count_finding("processes", facts.processes, 1024,
                    "ulimit -u 65536: each rank, worker and thread counts")};
  findings.push_back({"CPUs", Health::ok,
                      std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " usable",
                      ""});
  findings.push_back(port_finding(facts));
  return findings;
}

namespace {
constexpr const char* kAskTheDriver = "see what nvidia-smi reports; in containers pass --gpus all";

std::string remedy_of(const GpuReport& report) {
  if (report.problem.empty()) {
    return "";
  }
  if (report.problem.starts_with("CUDA_VISIBLE_DEVICES")) {
    return "correct CUDA_VISIBLE_DEVICES";
  }
  return report.problem.find("CUDA_DEVICE_ORDER") != std::string::npos
             ? "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
             : kAskTheDriver;
}

Finding no_gpus(const std::string& problem, bool wanted) {
  if (problem.starts_with("no NVIDIA driver here")) {
    return {
        "NVML", wanted ? Health::warn : Health::ok, problem,
        wanted ? "without a driver training runs on the CPU; in containers pass --gpus all" : ""};
  }
  return {"NVML", Health::fail, problem, kAskTheDriver};
}
}  // namespace

std::vector<Finding> check_gpus(const GpuReport& report, bool wanted) {
  if (report.gpus.empty()) {
    return {no_gpus(report.problem, wanted)};
  }
  std::vector<Finding> findings{
      {"NVML", report.problem.empty() ? Health::ok : Health::warn,
       "driver " + report.driver + (report.problem.empty() ? "" : "; " + report.problem),
       remedy_of(report)}};
  for (const auto& gpu : report.gpus) {
    Finding finding;
    finding.name = "GPU " + std::to_string(gpu.index) +
                   (gpu.mig_index ? "." + std::to_string(*gpu.mig_index) : "");
    if (!gpu.problem.empty()) {
      finding.health = Health::fail;
      finding.found = gpu.problem;
      finding.remedy = "keep it out of CUDA_VISIBLE_DEVICES until it works again";
    } else {
      finding.found = gpu.name + ", " +
                      (gpu.free_bytes ? format_bytes(*gpu.free_bytes) : "an unknown part") +
                      " free of " + (gpu.total_bytes ? format_bytes(*gpu.total_bytes) : "unknown");
    }
    findings.push_back(finding);
  }
  return findings;
}

}  // namespace brimful::probes
