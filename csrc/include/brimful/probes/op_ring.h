#pragma once
#include <brimful/export.h>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

/// The last 256 operators that this process began, on any thread, and while the device is behind all since the oldest whose
/// indices it has not reached (up to 4096). They are kept in host memory: what a device-side assert is explained with, when
/// the device no longer answers and the traceback names a later line. While it is on, each operator costs microseconds; off,
/// nothing.
namespace brimful::probes {

struct OpRecord {
  std::string name;                  ///< "aten::embedding", or a node of a backward pass
  std::vector<std::string> tensors;  ///< its inputs: "int64[8, 3] cuda:0"
  std::string where;  ///< "train.py:31 in forward"; of a backward node that of its forward
  bool backward = false;
  std::optional<int64_t>
      free_bytes;  ///< of the CUDA device, before an operator that uses cuDNN or cuBLAS
  std::optional<int64_t> input_bytes;  ///< of the tensors of such an operator
  bool indices_dropped = false;        ///< not copied: 1024 copies before it wait for the device
};

/// An index that an operator cannot have meant.
struct IndexFinding {
  std::string op;
  std::string where;
  int64_t lowest = 0;  ///< of the indices
  int64_t highest = 0;
  int64_t first_allowed = 0;
  int64_t last_allowed = 0;
};

/// "train.py:31: aten::embedding got index 50257, allowed are 0 to 50256"
BRIMFUL_API std::string to_string(const IndexFinding& finding);

/// Where this thread is in the user's program; empty where that is not known. Called before each operator.
using OpSite = std::function<std::string()>;

/// @throws c10::ValueError if it is on already
BRIMFUL_API void start_op_ring(OpSite site = nullptr);
/// Keeps what was recorded, for explain_error. Does nothing if it is off.
BRIMFUL_API void stop_op_ring();
BRIMFUL_API void clear_op_ring();
BRIMFUL_API bool op_ring_is_on();
/// Oldest first. Any thread.
BRIMFUL_API std::vector<OpRecord> op_ring_records();

/// The recorded embedding, index, index_select, gather, scatter, nll_loss and cross_entropy whose indices are out of range,
/// newest first. Indices of up to 2048 elements were copied when the operator began, on CUDA by an asynchronous copy that
/// comes before the kernel that fails; those of longer CPU tensors are read now if the tensor lives. Waits for no device.
BRIMFUL_API std::vector<IndexFinding> op_ring_index_findings();

}  // namespace brimful::probes
