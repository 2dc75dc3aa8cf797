#pragma once
#include <nccl.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sim_nccl {

/// To one peer and from it.
struct Wire {
  int in = -1, out = -1;
};

/// Outlives the communicator while work of a stream uses it.
struct Links {
  Links() = default;
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;
  ~Links();

  std::vector<Wire> wires;  // by rank
  std::atomic<bool> aborted{false};
  std::atomic<ncclResult_t> error{ncclSuccess};
};

/// Bytes to send or to receive.
struct Part {
  int peer;
  char* data;
  size_t left;
};

/// Moves the parts of each peer in their order, those of different peers together. A peer that is gone is an
/// asynchronous error; then, as NCCL's kernels, it waits for the abort.
void exchange(Links& links, std::vector<Part> sends, std::vector<Part> receives);

/// What a call asks for: a collective, or one message.
struct Transfer {
  ncclComm_t comm;
  cudaStream_t stream;
  std::vector<Part> sends, receives;
  std::function<void()> before, after;
};

/// Begins it, or keeps it for the end of the group.
ncclResult_t begin(Transfer transfer);

/// Connects the ranks of a communicator, which know each other by `id`.
ncclResult_t join(ncclComm_t* out, int size, const std::string& id, int rank);

/// The bytes of a value.
size_t width(ncclDataType_t type);

/// to[i] = from[0][i] op from[1][i] op ...: always in the order of the ranks.
void reduce(void* to, const std::vector<const char*>& from, size_t count, ncclDataType_t type,
            ncclRedOp_t op);

/// The address of memory that is only read.
inline char* bytes_of(const void* data) {
  return static_cast<char*>(const_cast<void*>(data));
}

}  // namespace sim_nccl

struct ncclComm {
  int rank, size;
  std::string id;
  int splits = 0;
  std::shared_ptr<sim_nccl::Links> links = std::make_shared<sim_nccl::Links>();
};
