// Groups of calls, and what is done of them: one piece of work of a stream for each communicator.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "../runtime/sim_cuda.h"
#include "communicator.h"

namespace sim_nccl {
namespace {

thread_local int depth = 0;
thread_local std::vector<Transfer> waiting;

struct Work {
  std::shared_ptr<Links> links;
  std::vector<Transfer> transfers;
  std::vector<long> results{};  // by the runtime's numbers
  long call = 0;

  void read_first();
};

/// On a device without arithmetic what is known follows the calls: what is sent is what was known in the call.
void Work::read_first() {
  for (Transfer& transfer : transfers) {
    if (transfer.before) {
      transfer.before();
    }
    for (Part& part : transfer.sends) {
      part.values = read(part.data, part.left);
    }
  }
  for (const Transfer& transfer : transfers) {
    if (transfer.result_bytes > 0) {
      results.push_back(sim_cuda_will_write(transfer.result, transfer.result_bytes));
    }
  }
}

void run(const Work& work) {
  const bool arithmetic = sim_cuda_has_arithmetic() != 0;
  const Turn turn(*work.links, work.call);
  std::vector<Part> sends;
  std::vector<Part> receives;
  for (const Transfer& transfer : work.transfers) {
    if (transfer.before && arithmetic) {
      transfer.before();
    }
    sends.insert(sends.end(), transfer.sends.begin(), transfer.sends.end());
    receives.insert(receives.end(), transfer.receives.begin(), transfer.receives.end());
  }
  if (arithmetic) {
    exchange(*work.links, std::move(sends), std::move(receives));
  } else {
    exchange_messages(*work.links, sends, receives);
  }
  for (const Transfer& transfer : work.transfers) {
    if (transfer.after && !work.links->aborted) {
      transfer.after();
    }
  }
  for (const long result : work.results) {
    sim_cuda_has_written(result);
  }
}

void enqueue(std::vector<Transfer> transfers) {
  const cudaStream_t stream = transfers.front().stream;
  auto links = transfers.front().comm->links;
  int device = 0;
  cudaGetDevice(&device);
  cudaSetDevice(transfers.front().comm->device);
  auto* work = new Work{std::move(links), std::move(transfers)};
  if (sim_cuda_has_arithmetic() == 0) {
    work->read_first();
  }
  work->call = work->links->calls++;
  sim_cuda_enqueue(
      stream,
      [](void* data) {
        const std::unique_ptr<Work> owned(static_cast<Work*>(data));
        run(*owned);
      },
      work);
  cudaSetDevice(device);
}

}  // namespace

ncclResult_t begin(Transfer transfer) {
  waiting.push_back(std::move(transfer));
  if (depth == 0) {
    enqueue(std::exchange(waiting, {}));
  }
  return ncclSuccess;
}

}  // namespace sim_nccl

extern "C" {

ncclResult_t ncclGroupStart() {
  ++sim_nccl::depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (--sim_nccl::depth > 0) {
    return ncclSuccess;
  }
  auto all = std::exchange(sim_nccl::waiting, {});
  while (!all.empty()) {
    const ncclComm_t comm = all.front().comm;
    const auto others = std::stable_partition(
        all.begin(), all.end(), [&](const auto& transfer) { return transfer.comm == comm; });
    std::vector<sim_nccl::Transfer> rest(std::make_move_iterator(others),
                                         std::make_move_iterator(all.end()));
    all.erase(others, all.end());
    sim_nccl::enqueue(std::move(all));
    all = std::move(rest);
  }
  return ncclSuccess;
}
}
