#include <brimful/probes/summary.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/format.h"
#include "base/markup.h"

namespace brimful::probes {

extern const char* const kSummaryTable;  ///< summary.html

namespace {

constexpr size_t kSummaryColumns = 11;
constexpr size_t kTexts = 3;  // columns that are not numbers
using Cells = std::array<std::string, kSummaryColumns>;
Cells titles() {
  return {"module",  "input",       "output", "calls",        "parameters",   "multiply-adds",
          "buffers", "activations", "saved",  "forward peak", "backward peak"};
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) {
    text += text.empty() ? "" : " x ";
    text += std::to_string(size);
  }
  return text.empty() ? "scalar" : text;
}

std::string shapes_text(const std::vector<std::vector<int64_t>>& shapes) {
  constexpr size_t kShown = 2;
  std::string text;
  for (size_t k = 0; k < std::min(shapes.size(), kShown); ++k) {
    text += k == 0 ? "" : ", ";
    text += shape_text(shapes[k]);
  }
  const size_t more = shapes.size() - std::min(shapes.size(), kShown);
  return more == 0 ? text : text + ", and " + std::to_string(more) + " more";
}

std::string label_of(const ModuleRow& row) {
  const auto dot = row.name.rfind('.');
  const std::string last = dot == std::string::npos ? row.name : row.name.substr(dot + 1);
  return last.empty() ? row.type : last + " (" + row.type + ")";
}

std::string parameters_text(const ModuleRow& row) {
  std::string text =
      row.trainable + row.frozen == 0 ? "" : format_count(row.trainable + row.frozen);
  if (row.frozen > 0) {
    text.append(" (").append(format_count(row.frozen)).append(" frozen)");
  }
  return text + (row.shares ? " (shared)" : "");
}

std::string bytes_text(int64_t bytes) {
  return bytes == 0 ? "" : format_bytes(bytes);
}

Cells cells_of(const ModuleRow& row) {
  const bool ran = row.calls > 0;
  return {label_of(row),
          shapes_text(row.inputs),
          shapes_text(row.outputs),
          ran ? std::to_string(row.calls) : "",
          parameters_text(row),
          row.multiply_adds == 0 ? "" : format_count(row.multiply_adds),
          bytes_text(row.buffer_bytes),
          bytes_text(row.activation_bytes),
          bytes_text(row.saved_bytes),
          bytes_text(row.forward_peak_bytes),
          bytes_text(row.backward_peak_bytes)};
}

std::string peaks_text(const StepSummary& summary) {
  if (summary.peak_bytes == 0) {
    return "peaks unknown: the device's allocator keeps no statistics";
  }
  std::string text = "peak " + format_bytes(summary.peak_bytes) + ": forward " +
                     format_bytes(summary.forward_peak_bytes);
  if (summary.backward_peak_bytes > 0) {
    text += ", backward " + format_bytes(summary.backward_peak_bytes);
  }
  if (summary.optimizer_peak_bytes > 0) {
    text += ", optimizer " + format_bytes(summary.optimizer_peak_bytes);
  }
  text += "; in use before the step " + format_bytes(summary.used_bytes);
  if (summary.predicted_bytes) {
    text += "; predicted from small batches " + format_bytes(*summary.predicted_bytes);
    if (summary.margin_bytes > 0) {
      text += ", may be short by " + format_bytes(summary.margin_bytes);
    }
    if (summary.workspaces_unknown) {
      text += ", without the workspaces that cuDNN's benchmark mode tries";
    }
  }
  return text;
}

std::string rows_text(const StepSummary& summary) {
  std::string text = std::to_string(summary.rows) + " rows on " + summary.device;
  if (summary.bytes_per_row) {
    text += ", " + format_bytes(std::llround(*summary.bytes_per_row)) + " more for each row";
  }
  if (summary.largest_rows) {
    text += "; the largest batch within " + format_bytes(*summary.limit_bytes) + ": " +
            format_count(*summary.largest_rows) + " rows";
  }
  return text;
}

std::vector<std::string> lines_below(const StepSummary& summary) {
  std::vector<std::string> lines{"mode: " + summary.mode, rows_text(summary), peaks_text(summary)};
  if (!summary.limit_plan.empty()) {
    lines.push_back(summary.limit_plan);
  }
  return lines;
}

std::string line_of(const Cells& cells, const std::array<size_t, kSummaryColumns>& widths) {
  std::string line;
  for (size_t column = 0; column < kSummaryColumns; ++column) {
    const std::string padding(widths[column] - cells[column].size(), ' ');
    line += column == 0 ? "" : "  ";
    line += column < kTexts ? cells[column] + padding : padding + cells[column];
  }
  return line.substr(0, line.find_last_not_of(' ') + 1);
}

Fields row_fields(const Cells& cells, int64_t depth) {
  Fields row{{{"module", cells[0]}, {"indent", std::to_string(depth + 1)}}};
  for (size_t column = 1; column < kSummaryColumns; ++column) {
    row.lists[column < kTexts ? "texts" : "numbers"].push_back({{{"text", cells[column]}}});
  }
  return row;
}

}  // namespace

void charge(std::vector<ModuleRow>& modules, const std::vector<MemorySpan>& spans) {
  for (const MemorySpan& span : spans) {
    for (size_t k = 0; k < span.modules.size(); ++k) {
      const int64_t place = span.modules[k];
      TORCH_CHECK_INDEX(0 <= place && place < static_cast<int64_t>(modules.size()),
                        "there is no such module (module: ", place, ", modules: ", modules.size(),
                        ")");
      const auto begin = span.modules.begin();
      if (std::find(begin, begin + static_cast<int64_t>(k), place) !=
          begin + static_cast<int64_t>(k)) {
        continue;  // a module that called itself
      }
      ModuleRow& row = modules[static_cast<size_t>(place)];
      int64_t& peak = span.backward ? row.backward_peak_bytes : row.forward_peak_bytes;
      peak = std::max(peak, span.peak_bytes);
      row.activation_bytes += span.backward ? 0 : span.change_bytes;
    }
  }
}

std::string to_string(const StepSummary& summary) {
  std::vector<Cells> table{titles()};
  for (const ModuleRow& row : summary.modules) {
    table.push_back(cells_of(row));
    table.back()[0].insert(0, 2 * static_cast<size_t>(row.depth), ' ');
  }
  std::array<size_t, kSummaryColumns> widths{};
  for (const Cells& cells : table) {
    for (size_t column = 0; column < kSummaryColumns; ++column) {
      widths[column] = std::max(widths[column], cells[column].size());
    }
  }
  std::string text;
  for (const Cells& cells : table) {
    text += line_of(cells, widths) + "\n";
  }
  for (const std::string& line : lines_below(summary)) {
    text += line + "\n";
  }
  text.pop_back();
  return text;
}

std::string to_html(const StepSummary& summary) {
  Fields fields;
  fields.lists["head"].push_back(row_fields(titles(), 0));
  auto& modules = fields.lists["modules"];
  for (const ModuleRow& row : summary.modules) {
    modules.push_back(row_fields(cells_of(row), row.depth));
  }
  auto& lines = fields.lists["lines"];
  for (std::string& line : lines_below(summary)) {
    lines.push_back({{{"text", std::move(line)}}});
  }
  return fill_markup(kSummaryTable, fields);
}

}  // namespace brimful::probes
