// The collectives, in terms of who sends what to whom.
#include <algorithm>

#include "../runtime/sim_cuda.h"
#include "communicator.h"

namespace {

using sim_nccl::begin;
using sim_nccl::bytes_of;
using sim_nccl::Transfer;
using sim_nccl::width;

Transfer empty(ncclComm_t comm, cudaStream_t stream) {
  Transfer made;
  made.comm = comm;
  made.stream = stream;
  return made;
}

/// What it writes, where the host waits for it: integers, and few numbers of other types.
void set_result(Transfer& transfer, void* to, size_t bytes, ncclDataType_t type) {
  constexpr size_t kFewBytes = size_t{64} << 10;
  const bool whole = type <= ncclUint64;
  if (bytes <= (whole ? sim_cuda_known_bytes() : std::min(kFewBytes, sim_cuda_known_bytes()))) {
    transfer.result = to;
    transfer.result_bytes = bytes;
  }
}

/// Values of all ranks that come together at a rank.
struct Reduction {
  const void* own;
  size_t stride;  // bytes from one rank's values to the next rank's; 0: all reduce the same
  void* result;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
  int root;  // -1: every rank gets its result
};

/// Nothing, if the values of a rank are not known.
std::string reduced(const std::vector<std::string>& values, const Reduction& r) {
  std::vector<const char*> from;
  for (const std::string& of_rank : values) {
    if (of_rank.size() != r.count * width(r.type)) {
      return {};
    }
    from.push_back(of_rank.data());
  }
  std::string result(r.count * width(r.type), 0);
  sim_nccl::reduce(result.data(), from, r.count, r.type, r.op);
  return result;
}

ncclResult_t begin_reduction(const Reduction& r, ncclComm_t comm, cudaStream_t stream) {
  if (r.op > ncclAvg) {
    return ncclInvalidUsage;
  }
  const size_t bytes = r.count * width(r.type);
  const int rank = comm->rank;
  const bool receives = r.root < 0 || r.root == rank;
  auto room = std::make_shared<std::vector<std::string>>(comm->size);
  Transfer t = empty(comm, stream);
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer == rank) {
      continue;
    }
    if (r.root < 0 || r.root == peer) {
      t.sends.push_back({peer, bytes_of(r.own) + peer * r.stride, bytes});
    }
    if (receives) {
      t.receives.push_back({peer, nullptr, bytes, &(*room)[peer]});
    }
  }
  if (receives && bytes > 0) {
    set_result(t, r.result, bytes, r.type);
    t.before = [=] { (*room)[rank] = sim_nccl::read(bytes_of(r.own) + rank * r.stride, bytes); };
    t.after = [=] { sim_nccl::write(r.result, reduced(*room, r), bytes); };
  }
  return begin(std::move(t));
}

/// A piece to every rank (the same one, with a stride of 0), a piece from every rank.
ncclResult_t begin_pieces(const void* from, size_t from_stride, void* to, size_t bytes,
                          ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  char* source = bytes_of(from);
  char* target = static_cast<char*>(to);
  const int rank = comm->rank;
  Transfer t = empty(comm, stream);
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer != rank) {
      t.sends.push_back({peer, source + peer * from_stride, bytes});
      t.receives.push_back({peer, target + peer * bytes, bytes});
    }
  }
  set_result(t, to, bytes * comm->size, type);
  t.before = [=] { sim_nccl::move(target + rank * bytes, source + rank * from_stride, bytes); };
  return begin(std::move(t));
}

}  // namespace

extern "C" {

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  Transfer t = empty(comm, stream);
  t.sends.push_back({peer, bytes_of(data), count * width(type)});
  return begin(std::move(t));
}

ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  Transfer t = empty(comm, stream);
  t.receives.push_back({peer, static_cast<char*>(data), count * width(type)});
  set_result(t, data, count * width(type), type);
  return begin(std::move(t));
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return begin_reduction({from, 0, to, count, type, op, -1}, comm, stream);
}

ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return begin_reduction({from, 0, to, count, type, op, root}, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return begin_reduction({from, count * width(type), to, count, type, op, -1}, comm, stream);
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * width(type);
  Transfer t = empty(comm, stream);
  if (comm->rank != root) {
    t.receives.push_back({root, static_cast<char*>(to), bytes});
    set_result(t, to, bytes, type);
    return begin(std::move(t));
  }
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer != root) {
      t.sends.push_back({peer, bytes_of(from), bytes});
    }
  }
  t.before = [=] { sim_nccl::move(to, from, bytes); };
  return begin(std::move(t));
}

ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return begin_pieces(from, 0, to, count * width(type), type, comm, stream);
}

ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * width(type);
  return begin_pieces(from, bytes, to, bytes, type, comm, stream);
}
}
