#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// What a model's step takes of a device's memory, module by module. Plain data and pure functions; from any thread.
namespace brimful::probes {

/// A stretch of a step in which the same modules ran.
struct MemorySpan {
  std::vector<int64_t> modules;  ///< places of the rows that ran, each inside the one before
  bool backward = false;
  int64_t peak_bytes = 0;    ///< the most that was in use in it, in all
  int64_t change_bytes = 0;  ///< in use at its end less in use at its beginning
};

/// One module and all that is inside it: all of its calls, or one of them.
struct ModuleRow {
  std::string name;  ///< "" for the model itself
  std::string type;
  int64_t depth = 0;
  int64_t calls = 0;                          ///< in one forward of the model
  std::vector<std::vector<int64_t>> inputs;   ///< shapes of the last call's tensors
  std::vector<std::vector<int64_t>> outputs;  ///< the same
  int64_t output_bytes = 0;                   ///< of all calls
  int64_t trainable = 0;                      ///< elements of parameters, each parameter once
  int64_t frozen = 0;
  int64_t parameter_bytes = 0;
  bool shares = false;  ///< a row before it has one of its own parameters as well
  int64_t buffer_bytes = 0;
  int64_t multiply_adds = 0;     ///< of its forwards: half the operations (FLOPs) that torch counts
  int64_t activation_bytes = 0;  ///< more in use when its forwards returned than when they began
  int64_t saved_bytes = 0;       ///< storages that its forwards saved first for backward
  int64_t forward_peak_bytes = 0;  ///< the most that was in use in all while it ran
  int64_t backward_peak_bytes = 0;
};

/// A step in its steady state: forward, backward, the optimizer. Bytes in use count all that the device holds; they are 0
/// where its allocator keeps no statistics.
struct StepSummary {
  std::vector<ModuleRow> modules;  ///< the model itself first
  std::string mode;                ///< "train", "eval, bfloat16", ...
  std::string device;
  int64_t rows = 0;
  int64_t used_bytes = 0;  ///< before the step, the batch and the optimizer's state included
  int64_t forward_peak_bytes = 0;
  int64_t backward_peak_bytes = 0;
  int64_t optimizer_peak_bytes = 0;
  int64_t peak_bytes = 0;
  std::optional<int64_t> predicted_bytes;  ///< what small batches said of peak_bytes
  int64_t margin_bytes =
      0;  ///< what predicted_bytes may be short by: what follows no law in the rows
  bool workspaces_unknown = false;  ///< cuDNN's benchmark mode: what it tries is not predicted
  std::optional<double> bytes_per_row;
  std::optional<int64_t> limit_bytes;   ///< on CUDA without a limit what the device has for tensors
  std::optional<int64_t> largest_rows;  ///< of a batch whose step stays within the limit
  std::string limit_plan;  ///< what this batch's step has to do within a limit that was asked for
};

/// Adds each span to the modules that ran in it.
/// @throws c10::IndexError for a module that has no row
BRIMFUL_API void charge(std::vector<ModuleRow>& modules, const std::vector<MemorySpan>& spans);

/// A table for people, and the same as HTML without scripts or styles of others.
BRIMFUL_API std::string to_string(const StepSummary& summary);
BRIMFUL_API std::string to_html(const StepSummary& summary);

}  // namespace brimful::probes
