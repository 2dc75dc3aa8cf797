#include <arpa/inet.h>
#include <brimful/probes/doctor.h>
#include <brimful/version.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <map>
#include <string>
#include "support/catch.h"
#include "support/scoped_env.h"

namespace test_doctor {

using namespace brimful::probes;

namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

LimitFacts healthy() {
  LimitFacts facts;
  facts.memory_bytes = 32 * kGiB;
  facts.memory_where = "/sys/fs/cgroup/memory.max";
  facts.memory_limited = true;
  facts.shm_total_bytes = 16 * kGiB;
  facts.shm_free_bytes = 15 * kGiB;
  facts.open_files = 65536;
  facts.cpus = 7.5;
  return facts;
}

Finding named(const std::vector<Finding>& findings, const std::string& name) {
  const auto found = std::find_if(findings.begin(), findings.end(),
                                  [&](const auto& finding) { return finding.name == name; });
  REQUIRE(found != findings.end());
  return *found;
}

}  // namespace

TEST_CASE("Healthy limits need no remedy", "[probes]") {
  for (const auto& finding : check_limits(healthy())) {
    CHECK(finding.health == Health::ok);
    CHECK(finding.remedy.empty());
    CHECK_FALSE(finding.found.empty());
  }
  CHECK(named(check_limits(healthy()), "CPUs").found == "7.5 usable");
}

TEST_CASE("Limits that hurt are reported with a remedy", "[probes]") {
  auto facts = healthy();
  facts.shm_free_bytes = kGiB / 16;
  facts.open_files = 1024;
  facts.processes = 100;
  facts.memory_bytes = kGiB / 2;
  facts.port_is_free = false;
  const auto findings = check_limits(facts);
  for (const char* name : {"/dev/shm", "open files", "processes", "host memory", "port 29500"}) {
    CHECK(named(findings, name).health == Health::warn);
    CHECK_FALSE(named(findings, name).remedy.empty());
  }
  facts.shm_total_bytes = std::nullopt;
  facts.port = 70000;
  CHECK(named(check_limits(facts), "/dev/shm").health == Health::fail);
  CHECK(named(check_limits(facts), "port 70000").health == Health::fail);
}

TEST_CASE("A port that another program has is seen", "[probes]") {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t size = sizeof(address);
  auto* any = reinterpret_cast<sockaddr*>(&address);
  REQUIRE(bind(fd, any, size) == 0);
  REQUIRE(listen(fd, 1) == 0);
  REQUIRE(getsockname(fd, any, &size) == 0);
  const auto port = std::to_string(ntohs(address.sin_port));
  const std::map<std::string, const char*> variables{{"MASTER_PORT", port.c_str()}};
  const brimful::test::ScopedEnv scope(variables);
  CHECK_FALSE(limits_now().port_is_free);
  close(fd);
  CHECK(limits_now().port_is_free);
  CHECK(std::to_string(limits_now().port) == port);
}

TEST_CASE("GPUs that are lost fail, and none is a warning where CUDA is wanted", "[probes]") {
  GpuReport report;
  report.problem = "no NVIDIA driver here (libnvidia-ml.so.1: cannot open shared object file)";
  CHECK(check_gpus(report, true).at(0).health == Health::warn);
  CHECK(check_gpus(report, false).at(0).health == Health::ok);
  report.problem = "libnvidia-ml.so.1 and the driver have different versions";
  CHECK(check_gpus(report, true).at(0).health == Health::fail);
  CHECK(check_gpus(report, true).at(0).remedy.find("nvidia-smi") != std::string::npos);
  Gpu well;
  well.name = "H100";
  well.free_bytes = kGiB;
  well.total_bytes = 2 * kGiB;
  Gpu lost;
  lost.index = 1;
  lost.problem = "the GPU is lost";
  report = {{well, lost}, "570", ""};
  const auto findings = check_gpus(report, true);
  CHECK(named(findings, "NVML").found == "driver 570");
  CHECK(named(findings, "NVML").remedy.empty());
  report.problem = "CUDA may number these GPUs otherwise; set CUDA_DEVICE_ORDER=PCI_BUS_ID to know";
  CHECK(check_gpus(report, true).at(0).remedy == "set CUDA_DEVICE_ORDER=PCI_BUS_ID");
  report.problem = "CUDA_VISIBLE_DEVICES names no GPU here: it ends before 7";
  CHECK(check_gpus(report, true).at(0).remedy == "correct CUDA_VISIBLE_DEVICES");
  CHECK(named(findings, "GPU 0").found == "H100, 1.0 GiB free of 2.0 GiB");
  CHECK(named(findings, "GPU 1").health == Health::fail);
}

TEST_CASE("The doctor warns of a build that lacks what torch has", "[probes]") {
  BuildFacts facts;
  facts.version = "1.2.3+torch2.15.cu13";
  facts.cuda = facts.nccl = facts.gloo = true;
  const auto whole = check_build(facts, true);
  CHECK(whole.health == Health::ok);
  CHECK(whole.found == "1.2.3+torch2.15.cu13, built with CUDA: yes, NCCL: yes, gloo: yes");
  CHECK(whole.remedy.empty());
  facts.cuda = facts.nccl = false;
  CHECK(check_build(facts, false).health == Health::ok);  // torch has no CUDA either
  const auto without = check_build(facts, true);
  CHECK(without.health == Health::warn);
  CHECK(without.found == "1.2.3+torch2.15.cu13, built with CUDA: no, NCCL: no, gloo: yes");
  CHECK(without.remedy.find("with BRIMFUL_CUDA=ON") != std::string::npos);
  facts.gloo = false;
  CHECK(check_build(facts, true).remedy == without.remedy);
  CHECK(check_build(facts, false).health == Health::warn);
  CHECK(check_build(facts, false).remedy.find("libgloo-dev") != std::string::npos);
}

TEST_CASE("The doctor knows what this build has", "[probes]") {
  const auto facts = build_facts();
  CHECK(facts.version == BRIMFUL_VERSION);
#ifdef BRIMFUL_USE_CUDA
  CHECK(facts.cuda);
  CHECK(facts.nccl);
#else
  CHECK_FALSE(facts.cuda);
  CHECK_FALSE(facts.nccl);
#endif
#ifdef BRIMFUL_USE_GLOO
  CHECK(facts.gloo);
#else
  CHECK_FALSE(facts.gloo);
#endif
}

}  // namespace test_doctor
