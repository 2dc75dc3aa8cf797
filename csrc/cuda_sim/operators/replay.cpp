// What a real device took beside the results of its operators, taken again by their stand-ins. Lines of the file are
//     aten::sum.dim_IntList 48000x256 98566656
// the operator, the shapes of its first tensors, with commas between them, and bytes. Rows are the size of the first dimension of
// the first tensor that has two. Tensors that are as long as that stand for any number of rows.
#include "replay.h"

#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

#include "../runtime/on_line.h"
#include "arguments.h"
#include "call.h"
#include "values.h"
#include "workspace.h"

namespace sim_operators {
namespace {

using SizesOfAll = std::vector<std::vector<int64_t>>;

constexpr size_t kTensors = 4;  // that a line has at most

struct Key {
  std::string text;  // shapes, with "n" for the rows
  int64_t rows;
};

Key key_of(const SizesOfAll& shapes) {
  int64_t rows = 0;
  for (const auto& shape : shapes) {
    if (rows == 0 && shape.size() > 1) {
      rows = shape[0];
    }
  }
  std::string text;
  for (const auto& shape : shapes) {
    for (size_t i = 0; i < shape.size(); ++i) {
      text += (i == 0 ? "" : "x") + (i == 0 && shape[0] == rows ? "n" : std::to_string(shape[i]));
    }
    text += ',';
  }
  return {text, rows};
}

using Table = std::map<std::string, std::map<std::string, std::map<int64_t, int64_t>>>;

[[noreturn]] void refuse(const char* what, const std::string& value, const char* remedy) {
  std::fprintf(stderr, "simulated CUDA: %s (SIM_CUDA_REPLAY: %s): %s\n", what, value.c_str(),
               remedy);
  std::_Exit(2);
}

SizesOfAll read_sizes(const std::string& text) {
  SizesOfAll shapes;
  std::istringstream tensors(text);
  for (std::string tensor; std::getline(tensors, tensor, ',');) {
    shapes.emplace_back();
    std::istringstream sizes(tensor);
    for (std::string size; std::getline(sizes, size, 'x');) {
      shapes.back().push_back(std::strtol(size.c_str(), nullptr, /*base=*/10));
    }
  }
  return shapes;
}

/// By operator, shapes and rows; of two lines with the same the larger one.
Table read_table(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    refuse("there is no such file", path, "name one that benchmarks/device_model/replay.py made");
  }
  Table table;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name, shapes, rest;
    int64_t bytes = -1;
    if (!(words >> name >> shapes >> bytes) || words >> rest || bytes < 0) {
      refuse("a line is not an operator, shapes and bytes", path + ", " + line,
             "correct it, as in: aten::sum.dim_IntList 48000x256 98566656");
    }
    const Key key = key_of(read_sizes(shapes));
    int64_t& taken = table[name][key.text][key.rows];
    taken = std::max(taken, bytes);
  }
  return table;
}

const Table& table() {
  static const auto* all = [] {
    const char* path = std::getenv("SIM_CUDA_REPLAY");
    return new Table(path == nullptr || *path == 0 ? Table() : read_table(path));
  }();
  return *all;
}

SizesOfAll sizes_of_all(const torch::jit::Stack& arguments) {
  SizesOfAll shapes;
  for (const c10::IValue& value : arguments) {
    if (value.isTensor() && value.toTensor().defined() && shapes.size() < kTensors) {
      shapes.push_back(value.toTensor().sizes().vec());
    }
  }
  return shapes;
}

int64_t bytes_of(const std::string& name, const Key& key) {
  const auto shapes = table().find(name);
  if (shapes == table().end()) {
    return 0;
  }
  const auto rows = shapes->second.find(key.text);
  return rows == shapes->second.end() ? 0 : sim::on_line(rows->second, key.rows);
}

/// That of products, which the real device has had since the first one.
void keep_workspace(c10::Device device) {
  static std::mutex mutex;
  static auto* kept = new std::map<c10::DeviceIndex, at::DataPtr>;
  const std::lock_guard lock(mutex);
  if (!kept->contains(device.index())) {
    kept->emplace(device.index(), workspace());
  }
}

}  // namespace

bool is_replayed(const std::string& operator_name) {
  return table().contains(operator_name) || (!table().empty() && takes_workspace(operator_name));
}

void call_replayed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = static_cast<int64_t>(schema.arguments().size());
  const torch::jit::Stack arguments(stack->end() - count, stack->end());
  const std::string name = c10::toString(op.operator_name());
  const c10::Device device = places_of(schema, arguments).device;
  const c10::OptionalDeviceGuard guard(device);
  if (takes_workspace(name)) {
    keep_workspace(device);
  }
  const int64_t bytes = bytes_of(name, key_of(sizes_of_all(arguments)));
  at::DataPtr lent;
  if (bytes > 0) {
    lent = c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<size_t>(bytes));
  }
  call_on_cpu(op, stack);
}

}  // namespace sim_operators
