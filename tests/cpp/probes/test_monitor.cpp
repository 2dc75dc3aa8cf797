#include <brimful/log.h>
#include <brimful/probes/monitor.h>
#include <c10/util/Exception.h>
#include <stdlib.h>
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
  CHECK_THAT(json, Catch::Contains(R"("unix_s": 12.5)"));
  CHECK_THAT(json,
             Catch::Contains(R"("name": "py\"thon", "rss_bytes": 314572800, "uss_bytes": null)"));
  CHECK_THAT(json, Catch::Contains(R"("used_bytes": 5242880, "free_bytes": null)"));
  CHECK_THAT(json, Catch::Contains(R"("problem": "the GPU is lost", "processes": null})"));
  CHECK_THAT(json, Catch::Contains(R"("limit_bytes": null}], "driver": "570.86.10")"));
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
  while (monitor.samples() < 4) {
    usleep(1000);
  }
  monitor.stop();
  monitor.stop();
  const auto samples = monitor.samples();
  const auto lines = folder.text("samples.jsonl");
  CHECK(std::count(lines.begin(), lines.end(), '\n') == samples);
  CHECK_THAT(folder.text("brimful.prom"), Catch::Contains("brimful_process_rss_bytes "));
  CHECK_FALSE(std::filesystem::exists(folder.path + "/brimful.prom.partial"));
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
  CHECK_THAT(warnings[0], Catch::Contains("no more JSON lines: cannot open the file (path: "));
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
