#pragma once
#include <brimful/export.h>
#include <brimful/memory/categories.h>
#include <brimful/memory/origin.h>
#include <brimful/probes/fragmentation.h>
#include <brimful/probes/leak.h>

#include <optional>
#include <string>
#include <vector>

/// What filled a device's memory when a request was refused, the likely causes, and what to change. While tracking is on
/// (memory/live_table.h), each refusal of the CPU's allocator and of torch's CUDA allocator is looked at once.
namespace brimful::probes {

/// A model of the program, and no part of another one.
struct OomModel {
  std::string name;   ///< of its class
  int64_t bytes = 0;  ///< parameters and buffers
  bool training = true;
};

/// What the program's language knows (Python: objects that live), with the labels of its tensors.
struct OomProgram {
  std::vector<OomModel> models;
  std::vector<std::string> optimizers;  ///< names of their classes
  bool uses_sizer = false;
  bool building =
      false;  ///< a model is being made, or moved, by the thread whose request was refused
  std::vector<memory::Label> labels;
};

struct OomSite {
  std::string place;  ///< "train.py:31 (step)"
  memory::Phase phase = memory::Phase::other;
  int64_t bytes = 0;
  int64_t blocks = 0;
};

struct OomGrowth {
  std::string place;
  int64_t steps = 0;
  int64_t bytes = 0;
};

struct OomProcess {
  std::string name;
  int64_t pid = 0;
  int64_t bytes = 0;
};

/// As things stood at the refusal.
struct OomFacts {
  memory::Origin origin;
  std::string device = "cpu";
  int64_t request_bytes = 0;
  int64_t used_bytes = 0;
  int64_t tracked_bytes = 0;             ///< of them, in blocks of which the line is known
  std::optional<int64_t> limit_bytes;    ///< the budget, or the device's size
  std::optional<int64_t> largest_bytes;  ///< the largest request that would have been granted
  int64_t step = 0;
  memory::Phase phase = memory::Phase::other;
  std::string place;  ///< whose request it was
  std::string node;   ///< the graph's node that ran, in backward
  bool grad_enabled = false;
  bool earlier_forward = false;  ///< a forward of an earlier step fitted
  memory::CategoryBytes by_category{};
  int64_t kept_gradient_bytes = 0;  ///< taken by the backward of an earlier step
  int64_t step_gradient_bytes = 0;  ///< taken by this step's, of parameters where these are known
  int64_t flow_bytes = 0;           ///< gradients of activations in this step's backward
  bool request_flows = false;       ///< the request is for one of them
  int64_t data_bytes = 0;  ///< made in the first step or before it, of no model and no graph
  std::string data_place;  ///< that has the most of it
  bool attention =
      false;  ///< the request, or most of the activations, is of attention that is written out
  std::vector<OomSite> sites;                  ///< the most bytes first, at most 12
  std::vector<OomGrowth> growing;              ///< the same
  std::optional<Fragmentation> fragmentation;  ///< CUDA's
  bool expandable_segments = false;
  std::optional<int64_t>
      context_bytes;  ///< this process's, beside the allocator (gpus.h); in no category
  std::optional<int64_t>
      others_bytes;  ///< of other processes; with this one's context where that is not known
  std::vector<OomProcess> processes;  ///< this one's children, the largest first
  std::optional<OomProgram> program;
};

enum class OomCause : uint8_t {
  activations,
  large_batch,     ///< earlier steps fitted, this one is larger
  no_grad,         ///< evaluation that records a graph
  temporary,       ///< one operator's own request
  growth,          ///< a line keeps its tensors of each step
  gradients_kept,  ///< of an earlier step, in a forward
  optimizer_state,
  embedding_gradient,
  model,        ///< it does not fit by itself
  other_model,  ///< another one in this process
  fragmentation,
  others,  ///< other processes
  data,    ///< tensors of the first step or before it, of no model
};
BRIMFUL_API const char* name_of(OomCause cause);

struct OomFinding {
  OomCause cause = OomCause::activations;
  int64_t bytes = 0;   ///< that it explains
  std::string text;    ///< "activations hold 1.2 GiB, most of them at train.py:31"
  std::string advice;  ///< what to change
};

/// The most likely first. Pure.
BRIMFUL_API std::vector<OomFinding> findings(const OomFacts& facts);
/// At most 12 lines, for an error's message.
BRIMFUL_API std::string to_short_string(const OomFacts& facts);
/// All that is known, as text, and as one HTML page that needs no other file. Pure.
BRIMFUL_API std::string to_string(const OomFacts& facts);
BRIMFUL_API std::string to_html(const OomFacts& facts);

/// Begins to look at refusals, for as long as the process lives: a refusal while tracking is off costs a glance. What is
/// found is appended to the message of the CPU's error (to_short_string). CUDA's errors have torch's text: use last_oom().
/// Called by brimful's Python; a C++ program calls it once.
BRIMFUL_API void watch_ooms();
/// Of the last refusal that was looked at, in any thread; nothing before the first. Any thread.
BRIMFUL_API std::optional<OomFacts> last_oom();
/// Each report that is not of an attempt that is retried is also written to this file as HTML, the newest over the
/// others; nothing: no file. Where it cannot be written one warning says so. The variable BRIMFUL_OOM_REPORT is the
/// first value.
BRIMFUL_API void set_oom_report_path(std::optional<std::string> path);
/// Writes the report of a retried attempt, if one has come since the last that was written.
BRIMFUL_API void write_pending_oom_report();

}  // namespace brimful::probes
