#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include "probes/gpu/cuda_numbers.h"
#include "probes/gpu/reader.h"
#include "probes/gpu/visible_devices.h"
#include "support/catch.h"
#include "support/scoped_env.h"

namespace test_gpus {

using namespace brimful::probes;

namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

/// A reader of the made-up driver in a scenario, on this machine or in a container.
class Machine {
 public:
  explicit Machine(const char* scenario, const char* library = FAKE_NVML_LIBRARY)
      : reader(library) {
    set(scenario);
    root = (std::filesystem::temp_directory_path() / "brimful_XXXXXX").string();
    REQUIRE(mkdtemp(root.data()) != nullptr);
    std::filesystem::create_directories(root + "/proc/self/ns");
    std::ofstream(root + "/proc/meminfo") << "MemTotal: 2097152 kB\nMemAvailable: 1048576 kB\n";
    pid_namespace("pid:[4026531836]");
    around.root = root;
  }
  ~Machine() {
    std::filesystem::remove_all(root);
    unsetenv("FAKE_NVML");
  }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  static void set(const char* scenario) { setenv("FAKE_NVML", scenario, 1); }
  void pid_namespace(const char* name) const {
    const auto link = root + "/proc/self/ns/pid";
    std::filesystem::remove(link);
    std::filesystem::create_symlink(name, link);
  }
  GpuReport read() { return reader.read(around); }

  std::string root;
  GpuReader reader;
  GpuSurroundings around;
};

}  // namespace

TEST_CASE("What a process has of a GPU beside torch's allocator is known where the driver knows",
          "[probes]") {
  Machine machine("healthy");
  auto report = machine.read();
  CHECK(context_bytes(report, 0, kGiB / 2) == 3 * kGiB / 2);
  CHECK(context_bytes(report, 0, 3 * kGiB) == 0);  // taken between the two readings
  CHECK_FALSE(context_bytes(report, 2, 0));        // no such device
  report.gpus[0].own_bytes = std::nullopt;
  CHECK_FALSE(context_bytes(report, 0, 0));
  CHECK_FALSE(context_bytes(c10::DeviceType::CPU));
}

TEST_CASE("A healthy driver's numbers are reported", "[probes]") {
  Machine machine("healthy");
  const auto report = machine.read();
  CHECK(report.problem.empty());
  CHECK(report.driver == "570.86.10");
  REQUIRE(report.gpus.size() == 2);
  const auto& gpu = report.gpus[0];
  CHECK(gpu.name == "NVIDIA H100");
  CHECK(gpu.uuid == "GPU-00000000-1111-2222-3333-444444444444");
  CHECK(gpu.serial == "165000000000");
  CHECK(gpu.total_bytes == 80 * kGiB);
  CHECK(gpu.used_bytes == 9 * kGiB);
  CHECK(gpu.free_bytes == 70 * kGiB);
  CHECK(gpu.reserved_bytes == kGiB);  // the driver's, counted apart
  CHECK(gpu.busy == 0.97);
  CHECK(gpu.temperature_c == 61);
  CHECK(gpu.power_w == 412.5);
  CHECK(gpu.power_limit_w == 700);
  CHECK(gpu.display_active == false);
  REQUIRE(gpu.processes);
  CHECK(gpu.processes->size() == 2);
  CHECK(gpu.own_bytes == 2 * kGiB);
  CHECK(gpu.cuda_index == 0);
  CHECK(report.gpus[1].own_bytes == 0);  // known: not on it
  CHECK(report.gpus[1].processes->empty());
  CHECK(gpu.problem.empty());
}

TEST_CASE("A divided GPU shows its instances", "[probes]") {
  Machine machine("mig");
  const auto report = machine.read();
  REQUIRE(report.gpus.size() == 4);
  CHECK(report.gpus[0].mig_mode);
  CHECK_FALSE(report.gpus[0].processes);  // shown to root alone, and unknown is not none
  CHECK_FALSE(report.gpus[0].own_bytes);
  CHECK(report.gpus[0].total_bytes == 80 * kGiB);
  CHECK(report.gpus[1].mig_index == 0);
  CHECK(report.gpus[2].mig_index == 2);
  CHECK(report.gpus[2].index == 0);
  CHECK(report.gpus[2].uuid.starts_with("MIG-00000006"));
  CHECK(report.gpus[2].total_bytes == 20 * kGiB);
  CHECK_FALSE(report.gpus[2].busy);
  CHECK_FALSE(report.gpus[2].unified_memory);
  CHECK(report.gpus[2].own_bytes == 2 * kGiB);
  CHECK(report.gpus[3].index == 1);
  // One instance is all that CUDA shows.
  CHECK_FALSE(report.gpus[0].cuda_index);
  CHECK(report.gpus[1].cuda_index == 0);
  CHECK_FALSE(report.gpus[3].cuda_index);
  machine.around.visible_devices = "MIG-00000006-1111-2222-3333-444444444444";
  CHECK(machine.read().gpus[2].cuda_index == 0);
  machine.around.cuda_uuids = {"00000006111122223333444444444444"};
  machine.around.visible_devices = "nonsense";  // CUDA itself knows better
  CHECK(machine.read().gpus[2].cuda_index == 0);
  CHECK(machine.read().problem.empty());
}

TEST_CASE("What belongs to the whole GPU, or to the host, is reported of no instance", "[probes]") {
  Machine machine("mig_silent");  // its instances answer what is asked of a GPU, but for memory
  const auto report = machine.read();
  REQUIRE(report.gpus.size() == 4);
  CHECK(report.gpus[0].busy == 0.97);
  CHECK_FALSE(report.gpus[0].unified_memory);
  CHECK_FALSE(report.gpus[2].unified_memory);
  CHECK_FALSE(report.gpus[2].total_bytes);
  CHECK_FALSE(report.gpus[2].busy);
  CHECK_FALSE(report.gpus[2].power_w);
  CHECK(report.gpus[2].serial.empty());
}

TEST_CASE("An old driver has fewer functions, and no crash", "[probes]") {
  Machine machine("healthy", FAKE_NVML_OLD_LIBRARY);
  const auto report = machine.read();
  REQUIRE(report.gpus.size() == 2);
  CHECK(report.gpus[0].total_bytes == 80 * kGiB);
  CHECK(report.gpus[0].used_bytes == 10 * kGiB);  // what is reserved is in it
  CHECK_FALSE(report.gpus[0].reserved_bytes);
  CHECK(report.gpus[0].processes->size() == 2);
  CHECK(report.gpus[0].own_bytes == 2 * kGiB);
  CHECK_FALSE(report.gpus[0].mig_mode);
}

TEST_CASE("What a driver does not report is nothing, never 0", "[probes]") {
  Machine machine("not_available");
  const auto gpu = machine.read().gpus.at(0);
  CHECK_FALSE(gpu.busy);
  CHECK_FALSE(gpu.temperature_c);
  CHECK_FALSE(gpu.power_w);
  CHECK_FALSE(gpu.display_mode);
  CHECK(gpu.serial.empty());
  REQUIRE(gpu.processes->size() == 1);
  CHECK_FALSE(gpu.processes->front().used_bytes);
  CHECK_FALSE(gpu.own_bytes);
  CHECK(gpu.total_bytes == 80 * kGiB);
  CHECK(gpu.problem.empty());
}

TEST_CASE("In a container pids are the host's", "[probes]") {
  Machine machine("host_pids");
  machine.pid_namespace("pid:[4026532198]");
  const auto gpu = machine.read().gpus.at(0);
  CHECK(gpu.processes->size() == 2);
  CHECK_FALSE(gpu.own_bytes);  // our pid is in the list, and is another process
  Machine::set("hidden_pids");
  CHECK_FALSE(machine.read().gpus.at(0).processes);  // 9 GiB are another process's
  machine.pid_namespace("pid:[4026531836]");
  CHECK(machine.read().gpus.at(0).processes->empty());
}

TEST_CASE("A GPU that shares the host's memory says so", "[probes]") {
  for (const char* scenario : {"unified", "unified_zero"}) {
    Machine machine(scenario);
    const auto gpu = machine.read().gpus.at(0);
    CHECK(gpu.unified_memory);
    CHECK(gpu.total_bytes == 2 * kGiB);
    CHECK(gpu.free_bytes == kGiB);
    CHECK(gpu.problem.empty());
  }
}

TEST_CASE("A driver that is lost and comes back", "[probes]") {
  Machine machine("healthy");
  CHECK(machine.read().gpus.size() == 2);
  Machine::set("lost");
  auto report = machine.read();
  REQUIRE(report.gpus.size() == 2);
  CHECK_THAT(report.gpus[0].problem, Catch::Contains("fell off the bus"));
  CHECK_FALSE(report.gpus[0].total_bytes);
  CHECK_FALSE(report.gpus[0].own_bytes);
  CHECK(report.gpus[1].total_bytes == 80 * kGiB);
  Machine::set("lost_midway");
  report = machine.read();
  CHECK_THAT(report.gpus.at(0).problem, Catch::Contains("fell off the bus"));
  CHECK_FALSE(report.gpus[0].total_bytes);  // which it had reported before
  CHECK(report.gpus[0].uuid == "GPU-00000000-1111-2222-3333-444444444444");
  Machine::set("lost_handle");
  CHECK_THAT(machine.read().gpus.at(0).problem, Catch::Contains("fell off the bus"));
  Machine::set("driver_gone");
  report = machine.read();
  CHECK(report.gpus.empty());
  CHECK_THAT(report.problem, Catch::Contains("went away"));
  CHECK(machine.read().gpus.empty());
  Machine::set("healthy");
  CHECK(machine.read().gpus.at(0).used_bytes == 9 * kGiB);
}

TEST_CASE("A driver that refuses, or has nothing, is reported as text", "[probes]") {
  CHECK_THAT(Machine("no_permission").read().gpus.at(0).problem, Catch::Contains("no permission"));
  CHECK_FALSE(Machine("no_permission").read().gpus.at(0).total_bytes);
  CHECK(Machine("zero").read().problem == "the driver has no GPU here");
  CHECK_THAT(Machine("init_failed").read().problem, Catch::Contains("not loaded"));
  CHECK_THAT(Machine("mismatch").read().problem, Catch::Contains("different versions"));
  const auto none = Machine("healthy", "libbrimful-has-no-such.so.1").read();
  CHECK_THAT(none.problem, Catch::Contains("no NVIDIA driver here (libbrimful-has-no-such.so.1"));
  CHECK(none.gpus.empty());
}

TEST_CASE("One field that is broken takes nothing else along", "[probes]") {
  const auto gpu = Machine("broken_power").read().gpus.at(0);
  CHECK_FALSE(gpu.power_w);
  CHECK(gpu.total_bytes == 80 * kGiB);
  CHECK(gpu.problem.empty());
  const auto huge = Machine("huge").read().gpus.at(0);
  CHECK(huge.total_bytes == 80 * kGiB);
  CHECK_FALSE(huge.used_bytes);
  CHECK_FALSE(huge.free_bytes);
  CHECK_FALSE(huge.busy);
  CHECK(Machine("long_names").read().driver.size() == nvml::kTextSize - 1);
  CHECK(Machine("long_names").read().gpus.at(0).name.size() == nvml::kTextSize - 1);
  CHECK(Machine("crowd").read().gpus.at(0).processes->size() == 50);
}

TEST_CASE("CUDA_VISIBLE_DEVICES is read as CUDA reads it", "[probes]") {
  const std::vector<PhysicalGpu> gpus{
      {"GPU-ab1", "H100", {}}, {"GPU-ab2", "H100", {}}, {"GPU-c", "H100", {}}};
  using Devices = std::optional<std::vector<VisibleDevice>>;
  const auto of = [&](const char* variable) { return visible_devices(variable, "", gpus).devices; };
  const VisibleDevice first{0, {}};
  const VisibleDevice second{1, {}};
  const VisibleDevice third{2, {}};
  CHECK(visible_devices(std::nullopt, "", gpus).devices == Devices({first, second, third}));
  CHECK(of("") == Devices(std::in_place));
  CHECK(of("2, 0") == Devices({third, first}));
  CHECK(of("1,-1,0") == Devices({second}));
  CHECK(of("1,7,0") == Devices({second}));
  CHECK(of("nonsense") == Devices(std::in_place));
  CHECK(of("0,1,0") == Devices(std::in_place));
  CHECK(of("GPU-c,GPU-ab1") == Devices({third, first}));
  CHECK(of("GPU-ab") == Devices(std::in_place));  // two fit
  CHECK(of("GPU-c,0") == Devices({third}));
  CHECK(of("99999999999999999999999") == Devices(std::in_place));
  CHECK_THAT(visible_devices("0,1,0", "", gpus).problem, Catch::Contains("twice"));
  CHECK_THAT(visible_devices("1,7", "", gpus).problem, Catch::Contains("ends before 7"));
  CHECK(visible_devices("-1", "", gpus).problem.empty());
}

TEST_CASE("CUDA's order of unlike GPUs is known only under PCI_BUS_ID", "[probes]") {
  Machine machine("mixed");
  machine.around.visible_devices = "1";
  const auto report = machine.read();
  CHECK_FALSE(report.gpus.at(0).cuda_index);
  CHECK_FALSE(report.gpus.at(1).cuda_index);
  CHECK_THAT(report.problem, Catch::Contains("CUDA_DEVICE_ORDER=PCI_BUS_ID"));
  machine.around.device_order = "PCI_BUS_ID";
  CHECK(machine.read().gpus.at(1).cuda_index == 0);
  machine.around.device_order = "";
  machine.around.visible_devices = "GPU-00000001";
  CHECK(machine.read().gpus.at(1).cuda_index == 0);
  machine.around.visible_devices = "0,0";
  machine.around.device_order = "PCI_BUS_ID";
  CHECK_FALSE(machine.read().gpus.at(0).cuda_index);
}

TEST_CASE("CUDA's UUIDs are found whatever their letters", "[probes]") {
  std::vector<Gpu> gpus(2);
  gpus[0].uuid = "GPU-ABCDEF01-1111-2222-3333-44444444444A";
  gpus[1].uuid = "GPU-abcdef02-1111-2222-3333-44444444444b";
  GpuSurroundings around;
  around.cuda_uuids = {"abcdef0211112222333344444444444b", "abcdef0111112222333344444444444a"};
  CHECK(number_as_cuda_does(around, gpus).empty());
  CHECK(gpus[0].cuda_index == 1);
  CHECK(gpus[1].cuda_index == 0);
}

TEST_CASE("Another library is loaded where the environment comes to name it", "[probes]") {
  const auto count = [](const char* library) {
    const std::map<std::string, const char*> variables{{"BRIMFUL_NVML", library},
                                                       {"FAKE_NVML", "healthy"}};
    const brimful::test::ScopedEnv scope(variables);
    return read_gpus().gpus.size();
  };
  CHECK(count(FAKE_NVML_LIBRARY) == 2);
  CHECK(count("libbrimful-has-no-such.so.1") == 0);
  CHECK(count(FAKE_NVML_LIBRARY) == 2);
}

TEST_CASE("A child of fork reads by itself", "[probes]") {
  const std::map<std::string, const char*> variables{{"BRIMFUL_NVML", FAKE_NVML_LIBRARY},
                                                     {"FAKE_NVML", "healthy"}};
  const brimful::test::ScopedEnv scope(variables);
  CHECK(read_gpus().gpus.size() == 2);
  const auto child = fork();
  if (child == 0) {
    _exit(read_gpus().gpus.size() == 2 ? 7 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WEXITSTATUS(status) == 7);
}

}  // namespace test_gpus
