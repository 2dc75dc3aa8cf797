#include "sizer/step_trace.h"

#include <unordered_map>

namespace brimful {

using memory::CachingRequest;
using Kind = CachingRequest::Kind;

StepTrace::StepTrace(c10::Device device) {
  if (device.is_cuda()) {
    cuda_ = std::make_unique<memory::CudaTraceScope>(device);
  } else {
    cpu_ = std::make_unique<memory::TraceScope>();
  }
}

bool StepTrace::is_possible(c10::Device device) {
  return device.is_cuda() ? memory::has_cuda_pool() : device.is_cpu();
}

size_t StepTrace::size() const {
  return cuda_ ? cuda_->requests().size() : cpu_->trace().size();
}

TracedRows StepTrace::traced(int64_t rows, size_t size) const {
  const auto count = static_cast<int64_t>(size);
  if (cuda_) {
    auto requests = cuda_->requests();
    requests.erase(requests.begin() + count, requests.end());
    return traced_of(rows, requests);
  }
  const auto& trace = cpu_->trace();
  return {rows, {trace.begin(), trace.begin() + count}};
}

TracedRows traced_of(int64_t rows, const std::vector<CachingRequest>& requests) {
  TracedRows traced{rows, {}};
  std::unordered_map<uint64_t, int64_t> taken_at;
  for (const auto& request : requests) {
    if (request.kind == Kind::take) {
      taken_at[request.block] = std::ssize(traced.trace);
      traced.trace.push_back(request.bytes);
      traced.blocks.push_back({request.stream});
    } else if (request.kind != Kind::give_back_pending) {
      const auto found = taken_at.find(request.block);
      if (found != taken_at.end()) {
        traced.trace.push_back(-traced.trace[static_cast<size_t>(found->second)]);
        traced.blocks.push_back({request.stream, found->second});
        taken_at.erase(found);
      }
    }
  }
  return traced;
}

std::vector<CachingRequest> requests_of(const memory::Trace& trace,
                                        const std::vector<TracedBlock>& blocks, uint64_t stream) {
  std::vector<CachingRequest> requests;
  std::unordered_map<int64_t, std::vector<uint64_t>> open;  // by bytes
  for (size_t event = 0; event < trace.size(); ++event) {
    const auto bytes = trace[event];
    if (bytes > 0) {
      const auto of = blocks.empty() ? stream : blocks[event].stream;
      requests.push_back({Kind::take, event, bytes, of});
      open[bytes].push_back(event);
    } else if (bytes < 0 && !blocks.empty()) {
      requests.push_back({Kind::give_back, static_cast<uint64_t>(blocks[event].taken_at)});
    } else if (auto& alike = open[-bytes]; !alike.empty()) {
      requests.push_back({Kind::give_back, alike.back()});
      alike.pop_back();
    }
  }
  return requests;
}

}  // namespace brimful
