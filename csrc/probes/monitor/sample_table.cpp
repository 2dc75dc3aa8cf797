#include <brimful/probes/sample.h>
#include <algorithm>
#include <cmath>
#include "base/format.h"

namespace brimful::probes {
namespace {

std::string bytes_or_unknown(const std::optional<int64_t>& bytes) {
  return bytes ? format_bytes(*bytes) : "unknown";
}

std::string decimal(const std::optional<double>& value, double scale, const char* unit) {
  return value ? std::to_string(std::llround(*value * scale)) + unit : "unknown";
}

using Row = std::vector<std::string>;

/// Columns as wide as their widest cell; the first row is the head.
std::string table(const std::vector<Row>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += row[i] + std::string(widths[i] - row[i].size() + 2, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string cpus_of(const HostMemory& host) {
  return format_number(std::round(host.cpus * 10) / 10);
}

std::string host_lines(const HostMemory& host) {
  std::string text = "host    " + bytes_or_unknown(host.available_bytes) + " available of " +
                     bytes_or_unknown(host.total_bytes) + ", " + cpus_of(host) + " CPUs usable\n";
  if (host.limit_bytes) {
    text += "limit   " + bytes_or_unknown(host.limit_free_bytes) + " free of " +
            format_bytes(*host.limit_bytes) + " (" + host.limit_where + ")\n";
  }
  if (host.shm_total_bytes) {
    text += "shm     " + bytes_or_unknown(host.shm_free_bytes) + " free of " +
            format_bytes(*host.shm_total_bytes) + " (/dev/shm)\n";
  }
  return text;
}

std::string gpu_table(const std::vector<Gpu>& gpus) {
  std::vector<Row> rows{{"GPU", "CUDA", "name", "busy", "used", "free", "total", "temp", "power"}};
  for (const auto& gpu : gpus) {
    const auto index =
        std::to_string(gpu.index) + (gpu.mig_index ? "." + std::to_string(*gpu.mig_index) : "");
    const auto cuda = gpu.cuda_index ? std::to_string(*gpu.cuda_index) : "-";
    if (!gpu.problem.empty()) {
      rows.push_back({index, cuda, gpu.problem});
      continue;
    }
    rows.push_back({index, cuda, gpu.name + (gpu.mig_mode ? " (MIG)" : ""),
                    decimal(gpu.busy, 100, "%"), bytes_or_unknown(gpu.used_bytes),
                    bytes_or_unknown(gpu.free_bytes),
                    bytes_or_unknown(gpu.total_bytes) + (gpu.unified_memory ? " (host's)" : ""),
                    decimal(gpu.temperature_c, 1, " C"), decimal(gpu.power_w, 1, " W")});
  }
  return table(rows);
}

std::string process_name(int64_t pid) {
  const auto process = pids_are_the_hosts() ? read_process(pid) : std::nullopt;
  return process ? process->name : "unknown";
}

std::string gpu_processes(const std::vector<Gpu>& gpus) {
  std::vector<Row> rows{{"GPU", "pid", "used", "process"}};
  for (const auto& gpu : gpus) {
    const auto index = std::to_string(gpu.index);
    if (!gpu.processes) {
      if (gpu.problem.empty()) {
        rows.push_back({index, "unknown", "", "the driver does not name them here"});
      }
      continue;
    }
    for (const auto& process : *gpu.processes) {
      rows.push_back({index, std::to_string(process.pid), bytes_or_unknown(process.used_bytes),
                      process_name(process.pid)});
    }
  }
  return rows.size() > 1 ? "\n" + table(rows) : "";
}

std::string process_table(const Sample& sample) {
  std::vector<Row> rows{{"pid", "resident", "private", "process"}};
  const auto add = [&](const Process& process) {
    rows.push_back({std::to_string(process.pid), bytes_or_unknown(process.rss_bytes),
                    bytes_or_unknown(process.uss_bytes), process.name});
  };
  add(*sample.process);
  std::for_each(sample.children.begin(), sample.children.end(), add);
  return "\n" + table(rows);
}

std::string largest_table(const std::vector<Process>& largest) {
  std::vector<Row> rows{{"pid", "resident", "process"}};
  for (const auto& process : largest) {
    rows.push_back(
        {std::to_string(process.pid), bytes_or_unknown(process.rss_bytes), process.name});
  }
  return "\n" + table(rows);
}

}  // namespace

std::string to_table(const Sample& sample) {
  std::string text = host_lines(sample.host);
  const auto& report = sample.gpus;
  text += "driver  " + (report.driver.empty() ? std::string("unknown") : report.driver) +
          (report.problem.empty() ? "" : ": " + report.problem) + "\n";
  if (!report.gpus.empty()) {
    text += "\n" + gpu_table(report.gpus) + gpu_processes(report.gpus);
  }
  if (sample.process) {
    text += process_table(sample);
  }
  if (!sample.largest.empty()) {
    text += largest_table(sample.largest);
  }
  return text;
}

}  // namespace brimful::probes
