#include <ATen/ops/empty.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/probes/monitor.h>
#include <c10/util/Exception.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include "support/catch.h"
#include "support/scoped_env.h"

namespace test_monitor {

using namespace brimful::probes;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

class Folder {
 public:
  Folder() {
    path = (std::filesystem::temp_directory_path() / "brimful_XXXXXX").string();
    REQUIRE(mkdtemp(path.data()) != nullptr);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string text(const std::string& name) const {
    std::ifstream file(path + "/" + name);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::string path;
};

Sample made_up() {
  Sample sample;
  sample.unix_s = 12.5;
  sample.process = Process{7, 1, "py\"thon", 300 * kMiB, std::nullopt, 0};
  sample.children = {Process{8, 7, "worker", 100 * kMiB, 40 * kMiB, 0},
                     Process{9, 7, "worker", 50 * kMiB, std::nullopt, 0}};
  sample.host.total_bytes = 1024 * kMiB;
  sample.host.cpus = 1.5;
  sample.torch = {{"cpu", 1, 2, 3, std::nullopt}};
  Gpu gpu;
  gpu.uuid = "GPU-1";
  gpu.name = "H100";
  gpu.used_bytes = 5 * kMiB;
  gpu.busy = 0.5;
  Gpu lost;
  lost.index = 1;
  lost.problem = "the GPU is lost";
  sample.gpus.gpus = {gpu, lost};
  sample.gpus.driver = "570.86.10";
  return sample;
}

}  // namespace

TEST_CASE("A sample's JSON says null for what is not known", "[probes]") {
  const auto json = to_json(made_up());
  CHECK(json.find('\n') == std::string::npos);
  CHECK_THAT(json, Catch::Contains(R"("unix_s":12.5)"));
  CHECK_THAT(json, Catch::Contains(R"("name":"py\"thon","rss_bytes":314572800,"uss_bytes":null)"));
  CHECK_THAT(json, Catch::Contains(R"("used_bytes":5242880,"free_bytes":null)"));
  CHECK_THAT(json, Catch::Contains(R"("problem":"the GPU is lost","processes":null})"));
  CHECK_THAT(json, Catch::Contains(R"("limit_bytes":null}],"driver":"570.86.10")"));
}

TEST_CASE("Prometheus' text keeps the samples of a name together and leaves out the unknown",
          "[probes]") {
  const auto text = to_prometheus(made_up());
  CHECK_THAT(text, Catch::Contains("# TYPE brimful_gpu_used_bytes gauge\n"
                                   "brimful_gpu_used_bytes{gpu=\"0\",uuid=\"GPU-1\"} 5242880\n"));
  CHECK_THAT(text, Catch::Contains("brimful_children_uss_bytes 41943040\n"));
  CHECK_THAT(text, Catch::Contains("brimful_children_rss_bytes 157286400\n"));
  CHECK_THAT(text, Catch::Contains("brimful_torch_used_bytes{device=\"cpu\"} 1\n"));
  CHECK(text.find("process_uss_bytes") == std::string::npos);
  CHECK(text.find("gpu=\"1\"") == std::string::npos);
  std::set<std::string> types;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("# TYPE")) {
      CHECK(types.insert(line).second);
    }
  }
}

TEST_CASE("The table says unknown, never 0, for what is not known", "[probes]") {
  const auto table = to_table(made_up());
  CHECK_THAT(table, Catch::Contains("50%   5.0 MiB  unknown  unknown  unknown  unknown"));
  CHECK_THAT(table, Catch::Contains("1    -     the GPU is lost"));
  CHECK_THAT(table, Catch::Contains("unknown available of 1.0 GiB, 1.5 CPUs usable"));
  CHECK_THAT(table, Catch::Contains("300.0 MiB  unknown   py\"thon"));
}

TEST_CASE("Every number of a sample has its own name in all texts", "[probes]") {
  Sample sample;
  sample.process = Process{7, 1, "train", 101 * kMiB, 102 * kMiB, 103 * kMiB};
  sample.host = {104 * kMiB,       105 * kMiB, 106 * kMiB, 107 * kMiB,
                 "/sys/fs/cgroup", 108 * kMiB, 109 * kMiB, 4};
  sample.torch = {{"cpu", 110, 111, 112, 113}};
  Gpu part;
  part.index = 3;
  part.mig_index = 2;
  part.unified_memory = true;
  part.uuid = "MIG-1";
  part.total_bytes = 114 * kMiB;
  part.used_bytes = 115 * kMiB;
  part.free_bytes = 116 * kMiB;
  part.reserved_bytes = 117 * kMiB;
  part.own_bytes = 118 * kMiB;
  part.temperature_c = 119;
  part.power_w = 120;
  part.power_limit_w = 121;
  part.processes.emplace() = {{122, 123 * kMiB}, {getpid(), 1}};
  Gpu whole;
  whole.name = "H100";
  whole.mig_mode = true;
  sample.gpus.gpus = {part, whole};

  const auto json = to_json(sample);
  const auto text = to_prometheus(sample);
  const auto told = [&](const char* group, const char* name, const char* label, int64_t number) {
    const auto value = std::to_string(number);
    CHECK_THAT(json, Catch::Contains("\"" + std::string(name) + "\":" + value));
    CHECK_THAT(text, Catch::Contains("\nbrimful_" + std::string(group) + "_" + name + label + " " +
                                     value + "\n"));
  };
  told("process", "rss_bytes", "", 101 * kMiB);
  told("process", "uss_bytes", "", 102 * kMiB);
  told("process", "swap_bytes", "", 103 * kMiB);
  told("host", "total_bytes", "", 104 * kMiB);
  told("host", "available_bytes", "", 105 * kMiB);
  told("host", "limit_bytes", "", 106 * kMiB);
  told("host", "limit_free_bytes", "", 107 * kMiB);
  told("host", "shm_free_bytes", "", 109 * kMiB);
  CHECK_THAT(json, Catch::Contains("\"shm_total_bytes\":" + std::to_string(108 * kMiB)));
  CHECK_THAT(text, Catch::Contains("brimful_children_count 0\n"));
  const char* cpu = "{device=\"cpu\"}";
  told("torch", "used_bytes", cpu, 110);
  told("torch", "peak_bytes", cpu, 111);
  told("torch", "reserved_bytes", cpu, 112);
  told("torch", "limit_bytes", cpu, 113);
  const char* gpu = "{gpu=\"3.2\",uuid=\"MIG-1\"}";
  told("gpu", "total_bytes", gpu, 114 * kMiB);
  told("gpu", "used_bytes", gpu, 115 * kMiB);
  told("gpu", "free_bytes", gpu, 116 * kMiB);
  told("gpu", "reserved_bytes", gpu, 117 * kMiB);
  told("gpu", "own_bytes", gpu, 118 * kMiB);
  told("gpu", "temperature_c", gpu, 119);
  told("gpu", "power_w", gpu, 120);
  CHECK_THAT(json, Catch::Contains("\"power_limit_w\":121"));
  CHECK_THAT(json, Catch::Contains("{\"pid\":122,\"used_bytes\":" + std::to_string(123 * kMiB)));

  const auto table = to_table(sample);
  CHECK_THAT(table, Catch::Contains("105.0 MiB available of 104.0 MiB, 4 CPUs usable\n"));
  CHECK_THAT(table, Catch::Contains("107.0 MiB free of 106.0 MiB (/sys/fs/cgroup)\n"));
  CHECK_THAT(table, Catch::Contains("109.0 MiB free of 108.0 MiB (/dev/shm)\n"));
  CHECK_THAT(table, Catch::Contains("\n3.2  -"));
  CHECK_THAT(table, Catch::Contains("115.0 MiB  116.0 MiB  114.0 MiB (host's)  119 C    120 W\n"));
  CHECK_THAT(table, Catch::Contains("H100 (MIG)"));
  CHECK_THAT(table, Catch::Contains("123.0 MiB"));
  const bool is_named = table.find("brimful_tests") != std::string::npos;
  CHECK(is_named == pids_are_the_hosts());  // else our pid is another process's
  CHECK_THAT(table, Catch::Contains("the driver does not name them here"));
}

TEST_CASE("The monitor writes what it samples, and a last one at the end", "[probes]") {
  const std::map<std::string, const char*> variables{{"BRIMFUL_NVML", "libbrimful-no-such.so"}};
  const brimful::test::ScopedEnv scope(variables);
  const Folder folder;
  std::mutex mutex;
  std::map<std::string, int64_t> last_step;
  MonitorOptions options;
  options.interval_ms = 5;
  options.json_path = folder.path + "/samples.jsonl";
  options.prometheus_path = folder.path + "/brimful.prom";
  options.add_scalar = [&](const std::string& tag, double value, int64_t step) {
    const std::lock_guard lock(mutex);
    REQUIRE(value >= 0);
    last_step[tag] = step;
  };
  Monitor monitor(options);
  while (monitor.samples() < 1) {
    usleep(1000);
  }
  const std::ifstream reader(options.prometheus_path);  // keeps the old file's number from use
  struct stat first {};
  REQUIRE(stat(options.prometheus_path.c_str(), &first) == 0);
  const auto seen = monitor.samples();
  while (monitor.samples() < seen + 3) {
    usleep(1000);
  }
  monitor.stop();
  monitor.stop();
  struct stat last {};
  REQUIRE(stat(options.prometheus_path.c_str(), &last) == 0);
  CHECK(first.st_ino != last.st_ino);  // replaced as a whole, never written into
  const auto samples = monitor.samples();
  const auto lines = folder.text("samples.jsonl");
  CHECK(std::count(lines.begin(), lines.end(), '\n') == samples);
  CHECK_THAT(folder.text("brimful.prom"), Catch::Contains("brimful_process_rss_bytes "));
  for (const auto& file : std::filesystem::directory_iterator(folder.path)) {
    CHECK(file.path().extension() != ".partial");
  }
  CHECK(last_step.at("process/rss_bytes") == samples - 1);
  CHECK(last_step.at("torch/cpu/used_bytes") == samples - 1);
}

TEST_CASE("The monitor stops at once, however long its interval", "[probes]") {
  MonitorOptions options;
  options.interval_ms = 3600 * 1000;
  Monitor monitor(options);
  monitor.stop();
  CHECK(monitor.samples() >= 1);
  options.interval_ms = 0;
  CHECK_THROWS_AS(Monitor(options), c10::ValueError);
}

TEST_CASE("The end is sampled too", "[probes]") {
  MonitorOptions options;
  options.interval_ms = 3600 * 1000;
  Monitor monitor(options);
  while (monitor.samples() < 1) {
    usleep(1000);
  }
  monitor.stop();
  CHECK(monitor.samples() == 2);
}

TEST_CASE("A sample's host is the system's", "[probes]") {
  struct sysinfo system {};
  REQUIRE(sysinfo(&system) == 0);
  const auto unit = static_cast<int64_t>(system.mem_unit);
  std::string held = "/dev/shm/brimful_XXXXXX";
  const int file = mkstemp(held.data());
  const std::string content(4 * kMiB, 'x');
  const bool has_shm = file >= 0 && write(file, content.data(), content.size()) == 4 * kMiB;
  const auto host = take_sample(-1).host;
  close(file);
  unlink(held.c_str());
  CHECK(host.cpus == usable_cpus());
  CHECK(host.total_bytes > static_cast<int64_t>(system.totalram) * unit / 2);
  CHECK(host.available_bytes > static_cast<int64_t>(system.freeram) * unit / 16);
  if (has_shm) {
    CHECK(*host.shm_total_bytes - *host.shm_free_bytes >= 4 * kMiB);
  }
}

TEST_CASE("A sample has torch's memory of this process", "[probes]") {
  brimful::memory::install();
  const auto held = at::empty({kMiB}, at::kByte);
  const auto before = brimful::memory::stats(c10::DeviceType::CPU).limit_bytes;
  const int64_t limit = int64_t{1} << 40;
  brimful::memory::set_limit(c10::DeviceType::CPU, limit);
  const auto torch = take_sample(getpid()).torch;
  brimful::memory::set_limit(c10::DeviceType::CPU, before);
  REQUIRE_FALSE(torch.empty());
  CHECK(torch[0].used_bytes >= kMiB);
  CHECK(torch[0].reserved_bytes >= kMiB);
  CHECK(torch[0].limit_bytes == limit);
}

TEST_CASE("A sample is of this process, of another one, or of none", "[probes]") {
  const auto own = take_sample(0);
  REQUIRE(own.process);
  CHECK(own.process->pid == getpid());
  CHECK(own.process->rss_bytes > kMiB);
  REQUIRE_FALSE(own.torch.empty());
  CHECK(own.torch[0].device == "cpu");
  CHECK(own.torch[0].used_bytes <= own.torch[0].peak_bytes);
  CHECK(own.unix_s > 1.7e9);
  CHECK(own.host.cpus > 0);
  CHECK(own.host.total_bytes > kMiB);
  CHECK(own.host.available_bytes < own.host.total_bytes);
  CHECK(own.host.shm_free_bytes <= own.host.shm_total_bytes);
  const auto parent = take_sample(getppid());
  CHECK(parent.torch.empty());
  CHECK(std::any_of(parent.children.begin(), parent.children.end(),
                    [](const Process& child) { return child.pid == getpid(); }));
  const auto nobody = take_sample(-1);
  CHECK_FALSE(nobody.process);
  CHECK(nobody.torch.empty());
}

TEST_CASE("A place that fails is left out after one warning; the others go on", "[probes]") {
  const Folder folder;
  std::vector<std::string> warnings;
  std::mutex mutex;
  brimful::set_log_sink([&](brimful::LogLevel, const std::string& line) {
    const std::lock_guard lock(mutex);
    warnings.push_back(line);
  });
  MonitorOptions options;
  options.interval_ms = 2;
  options.json_path = folder.path + "/no/such/folder/samples.jsonl";
  options.prometheus_path = folder.path + "/brimful.prom";
  options.add_scalar = [](const std::string&, double, int64_t) {
    throw std::runtime_error("the writer is closed");
  };
  {
    Monitor monitor(options);
    while (monitor.samples() < 4) {
      usleep(1000);
    }
  }
  brimful::set_log_sink(nullptr);
  REQUIRE(warnings.size() == 2);
  CHECK_THAT(warnings[0],
             Catch::Contains("no more JSON lines: cannot open the folder of a file (path: "));
  CHECK_THAT(warnings[1], Catch::Contains("no more scalars: the writer is closed"));
  CHECK_FALSE(folder.text("brimful.prom").empty());
}

TEST_CASE("A child of fork lets the parent's monitor alone", "[probes]") {
  MonitorOptions options;
  options.interval_ms = 1;
  auto monitor = std::make_unique<Monitor>(options);
  const auto child = fork();
  if (child == 0) {
    alarm(20);
    monitor->stop();
    monitor.reset();
    _exit(7);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 7);
}

}  // namespace test_monitor
