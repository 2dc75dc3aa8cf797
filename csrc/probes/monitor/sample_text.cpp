#include <brimful/probes/sample.h>
#include <array>
#include <charconv>
#include <map>
#include <numeric>
#include "base/json.h"

namespace brimful::probes {
namespace {

std::string number(double value) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

/// Writes objects and lists, with commas where they belong.
class Json {
 public:
  Json& open(char bracket, const char* name = nullptr) {
    begin(name);
    text_ += bracket;
    first_ = true;
    return *this;
  }
  Json& close(char bracket) {
    text_ += bracket;
    first_ = false;
    return *this;
  }
  Json& put(const char* name, const std::string& value) { return raw(name, json_string(value)); }
  Json& put(const char* name, bool value) { return raw(name, value ? "true" : "false"); }
  Json& put(const char* name, int value) { return raw(name, std::to_string(value)); }
  Json& put(const char* name, int64_t value) { return raw(name, std::to_string(value)); }
  Json& put(const char* name, double value) { return raw(name, number(value)); }
  template <typename T>
  Json& put(const char* name, const std::optional<T>& value) {
    return value ? put(name, *value) : raw(name, "null");
  }
  const std::string& text() const { return text_; }

 private:
  Json& raw(const char* name, const std::string& value) {
    begin(name);
    text_ += value;
    return *this;
  }
  void begin(const char* name) {
    text_ += first_ ? "" : ", ";
    first_ = false;
    text_ += name == nullptr ? "" : "\"" + std::string(name) + "\": ";
  }

  std::string text_;
  bool first_ = true;
};

void write(Json& json, const Process& process) {
  json.open('{').put("pid", process.pid).put("parent", process.parent).put("name", process.name);
  json.put("rss_bytes", process.rss_bytes).put("uss_bytes", process.uss_bytes);
  json.put("swap_bytes", process.swap_bytes).close('}');
}

void write(Json& json, const Gpu& gpu) {
  json.open('{').put("index", gpu.index).put("mig_index", gpu.mig_index);
  json.put("cuda_index", gpu.cuda_index).put("uuid", gpu.uuid).put("name", gpu.name);
  json.put("serial", gpu.serial).put("mig_mode", gpu.mig_mode);
  json.put("unified_memory", gpu.unified_memory).put("total_bytes", gpu.total_bytes);
  json.put("used_bytes", gpu.used_bytes).put("free_bytes", gpu.free_bytes);
  json.put("reserved_bytes", gpu.reserved_bytes).put("own_bytes", gpu.own_bytes);
  json.put("busy", gpu.busy).put("temperature_c", gpu.temperature_c).put("power_w", gpu.power_w);
  json.put("power_limit_w", gpu.power_limit_w).put("display_mode", gpu.display_mode);
  json.put("display_active", gpu.display_active).put("problem", gpu.problem);
  if (!gpu.processes) {
    json.put("processes", std::optional<int>()).close('}');
    return;
  }
  json.open('[', "processes");
  for (const auto& process : *gpu.processes) {
    json.open('{').put("pid", process.pid).put("used_bytes", process.used_bytes).close('}');
  }
  json.close(']').close('}');
}

void write_fields(Json& json, const GpuReport& report) {
  json.put("driver", report.driver).put("gpu_problem", report.problem).open('[', "gpus");
  for (const auto& gpu : report.gpus) {
    write(json, gpu);
  }
  json.close(']');
}

void write_fields(Json& json, const HostMemory& host) {
  json.open('{', "host").put("total_bytes", host.total_bytes);
  json.put("available_bytes", host.available_bytes).put("limit_bytes", host.limit_bytes);
  json.put("limit_free_bytes", host.limit_free_bytes).put("limit_where", host.limit_where);
  json.put("shm_total_bytes", host.shm_total_bytes).put("shm_free_bytes", host.shm_free_bytes);
  json.put("cpus", host.cpus).close('}');
}

/// The sum over the processes that tell it.
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
  json.open('{');
  write_fields(json, report);
  return json.close('}').text();
}

std::string to_json(const Sample& sample) {
  Json json;
  json.open('{').put("unix_s", sample.unix_s).open('[', "processes");
  if (sample.process) {
    write(json, *sample.process);
  }
  for (const auto* const others : {&sample.children, &sample.largest}) {
    for (const auto& process : *others) {
      write(json, process);
    }
  }
  json.close(']');
  write_fields(json, sample.host);
  json.open('[', "torch");
  for (const auto& torch : sample.torch) {
    json.open('{').put("device", torch.device).put("used_bytes", torch.used_bytes);
    json.put("peak_bytes", torch.peak_bytes).put("reserved_bytes", torch.reserved_bytes);
    json.put("limit_bytes", torch.limit_bytes).close('}');
  }
  json.close(']');
  write_fields(json, sample.gpus);
  return json.close('}').text();
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
    text += name + (labels.empty() ? "" : "{" + labels + "}") + " " + number(metric.value) + "\n";
  }
  return std::accumulate(lines.begin(), lines.end(), std::string(),
                         [](auto text, const auto& entry) { return text + entry.second; });
}

}  // namespace brimful::probes
