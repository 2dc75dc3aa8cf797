#include <pybind11/stl.h>
#include <string>
#include <tuple>
#include <unordered_map>
#include "bindings/bindings.h"
#include "bindings/device.h"
#include "memory/cuda_caching.h"

namespace brimful {
namespace {

using namespace memory;
using namespace py::literals;
/// What it asks, the block, bytes, stream.
using Request = std::tuple<std::string, uint64_t, int64_t, uint64_t>;

CachingRequest::Kind kind_of(const std::string& word) {
  using Kind = CachingRequest::Kind;
  static const std::unordered_map<std::string, Kind> kinds = {
      {"alloc", Kind::take},
      {"free_requested", Kind::give_back_pending},
      {"free_completed", Kind::complete}};
  const auto found = kinds.find(word);
  TORCH_CHECK_VALUE(found != kinds.end(), "this is no action of an allocator (action: ", word,
                    "); use alloc, free_requested or free_completed");
  return found->second;
}

py::tuple replay(const CudaPool& pool, const std::vector<Request>& asked) {
  std::vector<CachingRequest> requests;
  requests.reserve(asked.size());
  for (const auto& [action, block, bytes, stream] : asked) {
    requests.push_back({kind_of(action), block, bytes, stream});
  }
  std::vector<CachingMoment> moments;
  const auto outcome = pool.replay(requests, &moments);
  std::vector<std::pair<int64_t, int64_t>> after;
  after.reserve(moments.size());
  for (const auto& moment : moments) {
    after.emplace_back(moment.allocated_bytes, moment.reserved_bytes);
  }
  return py::make_tuple(after, outcome.ran_out, outcome.releases);
}

}  // namespace

void bind_caching(py::module_& m) {
  py::class_<CudaPool>(m, "_CudaPool").def("replay", &replay, "requests"_a);
  m.def(
      "_cuda_pool", [](py::handle device) { return cuda_pool(as_device(device)); }, "device"_a);
}

}  // namespace brimful
