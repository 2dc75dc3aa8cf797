#include "in_order.h"

#include <ATen/ThreadLocalState.h>
#include <c10/cuda/CUDAStream.h>

#include <future>
#include <memory>
#include <utility>

extern "C" {
int sim_cuda_defers(cudaStream_t stream);
void sim_cuda_enqueue(cudaStream_t stream, void (*work)(void*), void* data);
void sim_cuda_release(cudaStream_t stream);
}

namespace sim_operators {
namespace {

using Work = std::function<void()>;

cudaStream_t stream_of(c10::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

void run_owned(void* data) {
  const std::unique_ptr<Work> work(static_cast<Work*>(data));
  (*work)();
}

}  // namespace

bool defers(c10::Device device) {
  return sim_cuda_defers(stream_of(device)) != 0;
}

void enqueue(c10::Device device, Work work) {
  sim_cuda_enqueue(stream_of(device), run_owned, new Work(std::move(work)));
}

void call_in_order(c10::Device device, const Work& work) {
  if (!defers(device)) {
    work();
    return;
  }
  const auto done = std::make_shared<std::promise<void>>();
  auto result = done->get_future();
  enqueue(device, [&work, done, caller = at::ThreadLocalState()] {
    try {
      const at::ThreadLocalStateGuard as_caller(caller);
      work();
      done->set_value();
    } catch (...) {
      done->set_exception(std::current_exception());
    }
  });
  sim_cuda_release(stream_of(device));
  result.get();
}

}  // namespace sim_operators
