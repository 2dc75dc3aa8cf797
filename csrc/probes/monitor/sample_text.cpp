#include <brimful/probes/sample.h>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include "base/format.h"
#include "base/json.h"

namespace brimful::probes {
namespace {

using Json = nlohmann::ordered_json;

template <typename T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}

Json json_of(const Process& process) {
  return {{"pid", process.pid},
          {"parent", process.parent},
          {"name", process.name},
          {"rss_bytes", or_null(process.rss_bytes)},
          {"uss_bytes", or_null(process.uss_bytes)},
          {"swap_bytes", or_null(process.swap_bytes)}};
}

Json json_of(const Gpu& gpu) {
  Json processes;
  if (gpu.processes) {
    processes = Json::array();
    for (const auto& [pid, used_bytes] : *gpu.processes) {
      processes.push_back({{"pid", pid}, {"used_bytes", or_null(used_bytes)}});
    }
  }
  return {{"index", gpu.index},
          {"mig_index", or_null(gpu.mig_index)},
          {"cuda_index", or_null(gpu.cuda_index)},
          {"uuid", gpu.uuid},
          {"name", gpu.name},
          {"serial", gpu.serial},
          {"mig_mode", gpu.mig_mode},
          {"unified_memory", gpu.unified_memory},
          {"total_bytes", or_null(gpu.total_bytes)},
          {"used_bytes", or_null(gpu.used_bytes)},
          {"free_bytes", or_null(gpu.free_bytes)},
          {"reserved_bytes", or_null(gpu.reserved_bytes)},
          {"own_bytes", or_null(gpu.own_bytes)},
          {"busy", or_null(gpu.busy)},
          {"temperature_c", or_null(gpu.temperature_c)},
          {"power_w", or_null(gpu.power_w)},
          {"power_limit_w", or_null(gpu.power_limit_w)},
          {"display_mode", or_null(gpu.display_mode)},
          {"display_active", or_null(gpu.display_active)},
          {"problem", gpu.problem},
          {"processes", std::move(processes)}};
}

Json json_of(const HostMemory& host) {
  return {{"total_bytes", or_null(host.total_bytes)},
          {"available_bytes", or_null(host.available_bytes)},
          {"limit_bytes", or_null(host.limit_bytes)},
          {"limit_free_bytes", or_null(host.limit_free_bytes)},
          {"limit_where", host.limit_where},
          {"shm_total_bytes", or_null(host.shm_total_bytes)},
          {"shm_free_bytes", or_null(host.shm_free_bytes)},
          {"cpus", host.cpus}};
}

void add_fields(Json& json, const GpuReport& report) {
  json["driver"] = report.driver;
  json["gpu_problem"] = report.problem;
  auto& gpus = json["gpus"] = Json::array();
  for (const auto& gpu : report.gpus) {
    gpus.push_back(json_of(gpu));
  }
}

/// The sum over the processes that report it.
std::optional<int64_t> sum_of(const std::vector<Process>& processes,
                              std::optional<int64_t> Process::*member) {
  std::optional<int64_t> sum;
  for (const auto& process : processes) {
    if (const auto& bytes = process.*member) {
      sum = sum.value_or(0) + *bytes;
    }
  }
  return sum;
}

/// Collects the metrics of one group that are known.
class Group {
 public:
  Group(std::vector<Metric>& metrics, std::string name,
        std::vector<std::pair<std::string, std::string>> labels = {})
      : metrics_(metrics), name_(std::move(name)), labels_(std::move(labels)) {}
  template <typename T>
  Group& add(const char* quantity, const std::optional<T>& value) {
    return value ? add(quantity, static_cast<double>(*value)) : *this;
  }
  Group& add(const char* quantity, double value) {
    metrics_.push_back({name_, labels_, quantity, value});
    return *this;
  }

 private:
  std::vector<Metric>& metrics_;
  std::string name_;
  std::vector<std::pair<std::string, std::string>> labels_;
};

std::string label_of(const Gpu& gpu) {
  return std::to_string(gpu.index) + (gpu.mig_index ? "." + std::to_string(*gpu.mig_index) : "");
}

}  // namespace

std::vector<Metric> metrics_of(const Sample& sample) {
  std::vector<Metric> metrics;
  if (const auto& process = sample.process) {
    Group(metrics, "process")
        .add("rss_bytes", process->rss_bytes)
        .add("uss_bytes", process->uss_bytes)
        .add("swap_bytes", process->swap_bytes);
    Group(metrics, "children")
        .add("count", static_cast<double>(sample.children.size()))
        .add("rss_bytes", sum_of(sample.children, &Process::rss_bytes))
        .add("uss_bytes", sum_of(sample.children, &Process::uss_bytes));
  }
  Group(metrics, "host")
      .add("total_bytes", sample.host.total_bytes)
      .add("available_bytes", sample.host.available_bytes)
      .add("limit_bytes", sample.host.limit_bytes)
      .add("limit_free_bytes", sample.host.limit_free_bytes)
      .add("shm_free_bytes", sample.host.shm_free_bytes);
  for (const auto& torch : sample.torch) {
    Group(metrics, "torch", {{"device", torch.device}})
        .add("used_bytes", static_cast<double>(torch.used_bytes))
        .add("peak_bytes", static_cast<double>(torch.peak_bytes))
        .add("reserved_bytes", static_cast<double>(torch.reserved_bytes))
        .add("limit_bytes", torch.limit_bytes);
  }
  for (const auto& gpu : sample.gpus.gpus) {
    Group(metrics, "gpu", {{"gpu", label_of(gpu)}, {"uuid", gpu.uuid}})
        .add("total_bytes", gpu.total_bytes)
        .add("used_bytes", gpu.used_bytes)
        .add("free_bytes", gpu.free_bytes)
        .add("reserved_bytes", gpu.reserved_bytes)
        .add("own_bytes", gpu.own_bytes)
        .add("busy", gpu.busy)
        .add("temperature_c", gpu.temperature_c)
        .add("power_w", gpu.power_w);
  }
  return metrics;
}

std::string to_json(const GpuReport& report) {
  Json json;
  add_fields(json, report);
  return json_text(json);
}

std::string to_json(const Sample& sample) {
  Json json{{"unix_s", sample.unix_s}};
  auto& processes = json["processes"] = Json::array();
  if (sample.process) {
    processes.push_back(json_of(*sample.process));
  }
  for (const auto* const others : {&sample.children, &sample.largest}) {
    for (const auto& process : *others) {
      processes.push_back(json_of(process));
    }
  }
  json["host"] = json_of(sample.host);
  auto& devices = json["torch"] = Json::array();
  for (const auto& torch : sample.torch) {
    devices.push_back({{"device", torch.device},
                       {"used_bytes", torch.used_bytes},
                       {"peak_bytes", torch.peak_bytes},
                       {"reserved_bytes", torch.reserved_bytes},
                       {"limit_bytes", or_null(torch.limit_bytes)}});
  }
  add_fields(json, sample.gpus);
  return json_text(json);
}

std::string to_prometheus(const Sample& sample) {
  std::map<std::string, std::string> lines;  // those of one name must stand together
  for (const auto& metric : metrics_of(sample)) {
    const auto name = "brimful_" + metric.group + "_" + metric.quantity;
    std::string labels;
    for (const auto& [key, value] : metric.labels) {
      labels += (labels.empty() ? "" : ",") + key + "=" + json_string(value);
    }
    auto& text = lines[name];
    text += text.empty() ? "# TYPE " + name + " gauge\n" : "";
    text += name;
    text += labels.empty() ? "" : "{" + labels + "}";
    text += " " + format_number(metric.value) + "\n";
  }
  return std::accumulate(
      lines.begin(), lines.end(), std::string(),
      [](std::string text, const auto& entry) { return std::move(text) + entry.second; });
}

}  // namespace brimful::probes
