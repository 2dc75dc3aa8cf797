#pragma once
#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sim_nccl {

/// What a connection holds of messages: they say how many bytes there are, and move those alone that are known.
struct Messages {
  std::string arriving;     // what was read of the next one
  uint64_t here = 0;        // bytes that came and were not taken
  std::string values;       // the first of these bytes, as far as they are known
  uint64_t taken = 0;       // bytes that were taken here and of which the sender does not know
  uint64_t on_the_way = 0;  // bytes that were sent and that are not known to be taken
};

/// To one peer and from it.
struct Wire {
  int in = -1, out = -1;
  Messages messages{};
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
  std::atomic<long> calls{0};  // that were made
  std::atomic<long> done{0};   // of these, in their order
};

/// A communicator's work is done in the order of its calls, on whichever streams it is: one piece at a time.
class Turn {
 public:
  /// Waits until all calls before this one are done, or the communicator is aborted.
  Turn(Links& links, long call);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Links& links_;
};

/// Bytes to send or to receive. What is received into a room is there to be read on the host, as far as it is
/// known.
struct Part {
  int peer;
  char* data;
  size_t left;
  std::string* room = nullptr;
  std::string values{};  // of a message that is sent: its first bytes, as far as they are known
};

/// Moves the parts of each peer in their order, those of different peers together. A peer that is gone is an
/// asynchronous error; then, as NCCL's kernels, it waits for the abort.
void exchange(Links& links, std::vector<Part> sends, std::vector<Part> receives);
/// The same by messages, for devices without arithmetic. As with bytes, a send of more than a socket holds waits for
/// the one who receives.
void exchange_messages(Links& links, const std::vector<Part>& sends,
                       const std::vector<Part>& receives);
/// Waits for the abort, after a peer has gone.
void give_up(Links& links);

/// What a call asks for: a collective, or one message.
struct Transfer {
  ncclComm_t comm;
  cudaStream_t stream;
  std::vector<Part> sends, receives;
  std::function<void()> before, after;
  /// Where it writes what may be known on a device without arithmetic.
  void* result = nullptr;
  size_t result_bytes = 0;
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

/// What is known of memory of a device, from its first byte on.
std::string read(const void* from, size_t bytes);
/// Puts it there: the rest is not known any more.
void write(void* to, const std::string& values, size_t bytes);
/// Between memory of devices, which may overlap.
void move(void* to, const void* from, size_t bytes);

/// The address of memory that is only read.
inline char* bytes_of(const void* data) {
  return static_cast<char*>(const_cast<void*>(data));
}

}  // namespace sim_nccl

struct ncclComm {
  int rank, size;
  std::string id;
  int splits = 0;
  int device = 0;  // whose default stream is meant by none
  std::shared_ptr<sim_nccl::Links> links = std::make_shared<sim_nccl::Links>();
};
