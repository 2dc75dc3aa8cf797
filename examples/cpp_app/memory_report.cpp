// Where a LibTorch program's memory goes: places and categories of the peak, a place that leaks, what filled the memory when
// it ran out, and the GPUs.  memory_report [FILE]: the file gets a JSON line of the machine's memory every 100 ms
#include <brimful/brimful.h>
#include <brimful/memory/categories.h>
#include <brimful/memory/live_table.h>
#include <brimful/memory/stats.h>
#include <brimful/probes/gpus.h>
#include <brimful/probes/leak_finder.h>
#include <brimful/probes/monitor.h>
#include <brimful/probes/oom_report.h>
#include <torch/torch.h>

#include <iostream>
#include <optional>
#include <vector>

namespace memory = brimful::memory;

namespace {

constexpr int kSteps = 18;  // what no variable of Python holds is told of after ten
constexpr int kLargestSites = 5;

std::vector<memory::Label> labels_of(const torch::nn::Module& model) {
  std::vector<memory::Label> labels;
  for (const auto& parameter : model.parameters()) {
    labels.push_back({parameter.storage().data(),
                      static_cast<int64_t>(parameter.storage().nbytes()),
                      memory::Category::parameters});
  }
  return labels;
}

void print(const memory::Peak& peak) {
  std::cout << "peak: " << peak.bytes << " bytes in step " << peak.step << ", "
            << memory::name_of(peak.phase) << "\n";
  for (size_t i = 0; i < memory::kCategories; ++i) {
    if (peak.by_category[i] > 0) {
      std::cout << "  " << memory::name_of(static_cast<memory::Category>(i)) << ": "
                << peak.by_category[i] << "\n";
    }
  }
  for (size_t i = 0; i < peak.by_site.size() && i < kLargestSites; ++i) {
    const auto& use = peak.by_site[i];
    std::cout << "  " << memory::to_string(memory::site(use.site)) << ": " << use.bytes << " ("
              << memory::name_of(use.category) << ")\n";
  }
}

void run_out() {
  constexpr int64_t kRoomBytes = 1 << 20;
  memory::set_limit(torch::kCPU, memory::stats(torch::kCPU).used_bytes + kRoomBytes);
  try {
    const memory::SiteScope site("a batch that is too large");
    torch::zeros({2 * kRoomBytes}, torch::kUInt8);
  } catch (const c10::OutOfMemoryError&) {
    const auto facts = *brimful::probes::last_oom();
    std::cout << "ran out:" << brimful::probes::to_short_string(facts) << "\n";
  }
  memory::set_limit(torch::kCPU, std::nullopt);
}

void print_gpus() {
  const auto report = brimful::probes::read_gpus();
  std::cout << "GPUs: " << report.gpus.size() << " " << report.problem << "\n";
  for (const auto& gpu : report.gpus) {
    std::cout << "  " << gpu.name << ": " << gpu.used_bytes.value_or(-1) << " bytes in use\n";
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::optional<brimful::probes::Monitor> monitor;
  if (argc > 1) {
    monitor.emplace(brimful::probes::MonitorOptions{.interval_ms = 100, .json_path = argv[1]});
  }
  torch::manual_seed(0);
  brimful::probes::watch_ooms();
  memory::start_tracking();
  torch::nn::Sequential model(torch::nn::Linear(256, 512), torch::nn::ReLU(),
                              torch::nn::Linear(512, 10));
  torch::optim::Adam optimizer(model->parameters());
  brimful::probes::LeakFinder finder;
  std::vector<torch::Tensor> kept;  // planted: one output a step
  for (int step = 0; step < kSteps; ++step) {
    const memory::SiteScope data("data");
    const auto images = torch::randn({64, 256});
    const auto labels = torch::randint(10, {64});
    const memory::SiteScope forward("forward");
    const auto output = model->forward(images);
    kept.push_back(output.detach().clone());
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(output, labels).backward();
    {
      const memory::PhaseScope updating(memory::Phase::optimizer);
      const memory::SiteScope site("optimizer");
      optimizer.step();
    }
    memory::mark_step();
    finder.check();
  }
  print(memory::peak_by_category(c10::DeviceType::CPU, labels_of(*model)));
  for (const auto& leak : finder.leaks()) {
    std::cout << "leak: " << brimful::probes::to_string(leak) << "\n";
  }
  run_out();
  print_gpus();
  memory::stop_tracking();
}
