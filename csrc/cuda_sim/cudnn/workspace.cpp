// The workspaces of cuDNN's plans, from steps that were recorded (workspaces.inc). To make that list each workspace is asked
// for under a size of its own, an odd one, which shows among the allocator's events: SIM_CUDA_PROBE_WORKSPACES names the
// file that has the operations by these sizes.
#include "workspace.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "../runtime/on_line.h"
#include "../runtime/sim_cuda.h"
#include "descriptor.h"

namespace sim {
namespace {

struct Row {
  int64_t rows, bytes;
};

struct Recorded {
  std::string model;
  std::vector<Row> rows;
};

struct Tables {
  std::mutex mutex;
  std::multimap<std::string, Recorded> recorded;
  std::map<std::pair<std::string, int64_t>, int64_t> probes;
  std::string without;
  int64_t without_rows = 0;
};

Tables& tables() {
  static auto* all = [] {
    auto* made = new Tables;
    const std::vector<std::pair<std::string, Recorded>> rows{
#define SIM_WORKSPACES(operation, model, ...) {operation, {model, {__VA_ARGS__}}},
#include "workspaces.inc"
#undef SIM_WORKSPACES
    };
    made->recorded.insert(rows.begin(), rows.end());
    return made;
  }();
  return *all;
}

int64_t probe(const char* file, const std::string& operation, int64_t rows) {
  constexpr int64_t kFirst = 1000003;
  auto& probes = tables().probes;
  const auto [at, is_new] =
      probes.try_emplace({operation, rows}, kFirst + 2 * static_cast<int64_t>(probes.size()));
  if (is_new) {
    if (FILE* out = std::fopen(file, "a")) {
      std::fprintf(out, "%lld\t%lld\t%s\n", static_cast<long long>(at->second),
                   static_cast<long long>(rows), operation.c_str());
      std::fclose(out);
    }
  }
  return at->second;
}

/// The least or the most that it can be. Between two recorded rows another plan may begin anywhere; beyond them any may.
int64_t at_an_end(const std::map<int64_t, int64_t>& known, int64_t rows, int64_t bound) {
  const auto right = known.lower_bound(rows);
  if (right != known.end() && right->first == rows) {
    return right->second;
  }
  const bool most = sim_cuda_unknown() == kMost;
  if (right == known.end() || right == known.begin()) {
    return most ? bound : 0;
  }
  const Row left{std::prev(right)->first, std::prev(right)->second};
  return most ? std::max(left.bytes * rows / left.rows, right->second)
              : std::min(left.bytes, right->second * rows / right->first);
}

}  // namespace

int64_t workspace_for(const std::string& operation, int64_t rows, int64_t bound) {
  Tables& all = tables();
  const std::lock_guard lock(all.mutex);
  if (const char* file = std::getenv("SIM_CUDA_PROBE_WORKSPACES")) {
    return probe(file, operation, rows);
  }
  std::map<int64_t, int64_t> known;
  const auto [first, last] = all.recorded.equal_range(operation);
  for (auto at = first; at != last; ++at) {
    const bool left_out = at->second.model == all.without;
    for (const Row& row : at->second.rows) {
      if (!left_out || (all.without_rows != 0 && row.rows != all.without_rows)) {
        known[row.rows] = row.bytes;
      }
    }
  }
  return sim_cuda_unknown() == 0 ? on_line(known, rows) : at_an_end(known, rows, bound);
}

namespace {

// As cudnn_graph.h has them.
enum { kForward = 10, kBackwardFilter = 11, kBackwardData = 12 };
enum { kProduct = 19, kAttention = 41 };
constexpr size_t kOfAttention = 256;  // forward or backward, of GPT-2 in bf16 at each of five sizes
enum {
  kDilations = 102,
  kStrides = 103,
  kPaddings = 105,
  kForwardConvolution = 702,
  kForwardWeights = 703,
  kForwardInput = 704,
  kDataConvolution = 708,
  kDataWeights = 709,
  kDataInput = 710,
  kFilterConvolution = 714,
  kFilterWeights = 715,
  kFilterInput = 716,
  kGraphOperations = 801,
  kDataType = 901,
  kDimensions = 902,
  kTensorStrides = 903
};

std::string words(const std::vector<int64_t>& numbers, size_t from) {
  std::string all;
  for (size_t k = from; k < numbers.size(); ++k) {
    all += (k == from ? "" : "x") + std::to_string(numbers[k]);
  }
  return all;
}

constexpr int64_t kOfSmallOnes = int64_t{8} << 20;

int64_t product(const std::vector<int64_t>& numbers, size_t from) {
  return std::accumulate(numbers.begin() + static_cast<std::ptrdiff_t>(from), numbers.end(),
                         int64_t{1}, std::multiplies<>());
}

/// The most that any recorded convolution took: its operands unfolded by the kernel's points and once more in another
/// order, and some MiB for small ones.
int64_t bound_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& weights,
                 const Content& convolution, int64_t item) {
  const auto strides = convolution.numbers(kStrides);
  const auto paddings = convolution.numbers(kPaddings);
  const auto dilations = convolution.numbers(kDilations);
  int64_t output = sizes[0] * weights[0];
  for (size_t k = 0; k < strides.size(); ++k) {
    output *=
        (sizes[k + 2] + 2 * paddings[k] - dilations[k] * (weights[k + 2] - 1) - 1) / strides[k] + 1;
  }
  const int64_t operands = (product(sizes, 0) + output + product(weights, 0)) * item;
  return (product(weights, 2) + 1) * operands + kOfSmallOnes;
}

}  // namespace

namespace {

/// Whether these operations are an attention's: two products, five in its backward, or the one operation that there is
/// for a forward without a mask.
bool is_attention(const Content& graph) {
  const auto found = graph.attributes.find(kGraphOperations);
  if (found == graph.attributes.end()) {
    return false;
  }
  const auto& parts = found->second.parts;
  const auto count = [&](int kind) {
    return std::count_if(parts.begin(), parts.end(),
                         [&](const Shared& part) { return part != nullptr && part->kind == kind; });
  };
  return count(kAttention) == 1 || count(kProduct) >= 2;
}

}  // namespace

int64_t bytes_of(int data_type) {
  switch (data_type) {
    case 0:
    case 4:
      return 4;
    case 1:
    case 10:
      return 8;
    case 2:
    case 9:
      return 2;
    default:
      return 1;
  }
}

size_t workspace_of_graph(const Content& graph) {
  const Shared operation = graph.part(kGraphOperations);
  if (operation == nullptr) {
    return 0;
  }
  if (is_attention(graph)) {
    return kOfAttention;
  }
  struct Place {
    int kind;
    const char* name;
    int convolution, weights, input;
  };
  constexpr Place kPlaces[] = {
      {kForward, "forward", kForwardConvolution, kForwardWeights, kForwardInput},
      {kBackwardData, "input", kDataConvolution, kDataWeights, kDataInput},
      {kBackwardFilter, "weights", kFilterConvolution, kFilterWeights, kFilterInput}};
  for (const Place& place : kPlaces) {
    const Shared convolution = operation->part(place.convolution);
    const Shared weights = operation->part(place.weights);
    const Shared input = operation->part(place.input);
    if (operation->kind != place.kind || convolution == nullptr || weights == nullptr ||
        input == nullptr) {
      continue;
    }
    const auto sizes = input->numbers(kDimensions);
    const auto strides = input->numbers(kTensorStrides);
    const bool channels_last = strides.size() > 1 && strides[1] == 1 && sizes[1] != 1;
    const std::string key =
        std::string(place.name) + " " + std::to_string(input->enumerator(kDataType)) + " " +
        words(sizes, 1) + (channels_last ? " last " : " first ") +
        words(weights->numbers(kDimensions), 0) + " " + words(convolution->numbers(kStrides), 0) +
        " " + words(convolution->numbers(kPaddings), 0) + " " +
        words(convolution->numbers(kDilations), 0);
    const int64_t bound = bound_of(sizes, weights->numbers(kDimensions), *convolution,
                                   bytes_of(input->enumerator(kDataType)));
    return static_cast<size_t>(workspace_for(key, sizes[0], bound));
  }
  return 0;
}

}  // namespace sim

extern "C" {

/// From now on the list is used without this model's rows, or without one of them, which so does not prove itself.
void sim_cudnn_leave_out(const char* model, int64_t rows) {
  sim::Tables& all = sim::tables();
  const std::lock_guard lock(all.mutex);
  all.without = model;
  all.without_rows = rows;
}
}
