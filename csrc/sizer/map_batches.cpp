#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/error.h>
#include <brimful/memory/stats.h>
#include <brimful/sizer/map_batches.h>
#include <brimful/step/oom.h>
#include <brimful/step/pieces.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <list>
#include <mutex>
#include <string>
#include <utility>

#include "step/repetition.h"
#include "step/retry.h"
#include "step/too_large.h"
#include "step/undo.h"

namespace brimful::detail {
namespace {
constexpr size_t kKinds = 64;

struct Entry {
  std::string kind;
  int64_t elements = 1;  ///< of a row
  RetryPolicy policy;
};
struct Memos {
  std::mutex mutex;          ///< calls come from any thread
  std::list<Entry> entries;  ///< the last called first
};
Memos& memos() {
  static auto* instance = new Memos;
  return *instance;
}

std::string key_of(const MapKind& kind, c10::Device device) {
  return std::to_string(kind.function) + ' ' + device.str() + ' ' + kind.form;
}

RetryPolicy recall(const MapKind& kind, c10::Device device) {
  if (kind.function == 0) {
    return RetryPolicy({device});
  }
  const std::lock_guard<std::mutex> lock(memos().mutex);
  const auto key = key_of(kind, device);
  int64_t piece_rows = 0;  // of rows of another length: in proportion
  for (const auto& entry : memos().entries) {
    if (entry.kind != key) {
      continue;
    }
    if (entry.elements == kind.elements) {
      return entry.policy;
    }
    if (piece_rows == 0 && entry.policy.piece_rows() > 0) {
      const auto elements =
          static_cast<double>(entry.policy.piece_rows()) * static_cast<double>(entry.elements);
      piece_rows =
          std::max<int64_t>(static_cast<int64_t>(elements / static_cast<double>(kind.elements)), 1);
    }
  }
  return RetryPolicy({device}, piece_rows);
}

void remember(const MapKind& kind, c10::Device device, const RetryPolicy& policy) {
  if (kind.function == 0) {
    return;
  }
  const std::lock_guard<std::mutex> lock(memos().mutex);
  auto& entries = memos().entries;
  const auto key = key_of(kind, device);
  entries.remove_if(
      [&](const auto& entry) { return entry.kind == key && entry.elements == kind.elements; });
  entries.push_front({key, kind.elements, policy});
  if (entries.size() > kKinds) {
    entries.pop_back();
  }
}

void check_rows(const std::vector<at::Tensor>& results, int64_t rows) {
  bool any = false;
  for (size_t i = 0; i < results.size(); ++i) {
    const auto& result = results[i];
    if (!result.defined()) {  // LibTorch's "none", of any rows
      continue;
    }
    any = true;
    TORCH_CHECK_TYPE(result.layout() == at::kStrided,
                     "fn returned no dense tensor (tensor of the result: ", i,
                     "); return tensors with strides");
    TORCH_CHECK_VALUE(result.dim() > 0 && result.size(0) == rows,
                      "fn returned a wrong number of rows (tensor of the result: ", i,
                      ", shape: ", result.sizes(), ", rows of the piece: ", rows,
                      "); return one row in dimension 0 for every row of the piece");
  }
  TORCH_CHECK_TYPE(any, "fn returned no tensor (rows of the piece: ", rows,
                   "); return its results");
}

class Mapping {
 public:
  Mapping(int64_t rows, const MapPiece& piece, const MapTensors& tensors, const MapOptions& options,
          const MapKind& kind)
      : rows_(rows),
        piece_(piece),
        tensors_(tensors),
        options_(options),
        before_(Transaction({}, {options.device})),
        policy_(recall(kind, options.device)) {
    policy_.measure();
    for (const auto& keeper : options.keepers) {
      before_.transaction().add(keeper);
    }
    if (options.names) {
      before_.transaction().follow(options.names);
    }
    TORCH_CHECK_VALUE(rows >= 1, "the batch is empty (rows: 0); leave it out");
    TORCH_CHECK_VALUE(options.pieces >= 1,
                      "a batch has at least one piece (pieces: ", options.pieces, ")");
    TORCH_CHECK_VALUE(options.max_retries >= 0,
                      "max_retries must not be negative (max_retries: ", options.max_retries, ")");
    remembered_ = policy_.known_pieces(rows, options.pieces) > options.pieces;
  }

  /// What the next call of this kind begins with.
  const RetryPolicy& policy() const { return policy_; }

  std::vector<at::Tensor> run() {
    while (done_ < rows_) {
      const auto pieces = std::max(options_.pieces, policy_.first(rows_, options_.pieces).pieces);
      Retry retry(policy_, rows_, options_.max_retries, ExecutionPlan::in_pieces(rows_, pieces));
      retry.run([&] { return attempt(retry); });
    }
    return std::move(whole_);
  }

 private:
  /// One at the next rows.
  Ended attempt(Retry& retry) {
    const int64_t end = std::min(rows_, done_ + retry.plan().piece_rows);
    const ExecutionPlan as_run{pieces_for(rows_, end - done_), end - done_};
    const auto lets_go = c10::make_scope_exit([&] { before_.release(); });
    const auto shortage = try_rows(end);
    if (!shortage) {
      policy_.note_fit(as_run, {{options_.device, peak_bytes_}});
      done_ = end;
      return {};
    }
    before_.restore();
    retry.set_plan(as_run);
    retry.note(
        {.pieces = as_run.pieces, .piece_rows = as_run.piece_rows, .peak_bytes = peak_bytes_},
        true);
    return make_finer(retry, *shortage);
  }

  /// What was said when memory ran out, or nothing if the rows up to `end` are written. On return the handler has ended:
  /// nothing of the attempt lives.
  std::optional<std::string> try_rows(int64_t end) {
    const memory::PeakScope peak(options_.device);
    try {
      before_.capture(tensors_(done_, end));
      write(piece_(done_, end), end);
      peak_bytes_ = peak.peak_bytes();
    } catch (...) {
      const auto error = std::current_exception();
      if (!is_out_of_memory(error)) {
        throw;
      }
      peak_bytes_ = peak.peak_bytes();
      return to_string(error);
    }
    return std::nullopt;
  }

  void write(const std::vector<at::Tensor>& results, int64_t end) {
    check_rows(results, end - done_);
    if (done_ > 0) {
      require_alike(results, end);
    } else if (end == rows_) {
      for (const auto& result : results) {
        whole_.push_back(result.defined() && result.requires_grad() ? result.detach() : result);
      }
      return;
    } else {
      whole_ = allocate(results);
    }
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].defined()) {
        whole_[i].narrow(0, done_, end - done_).copy_(results[i]);
      }
    }
  }

  std::vector<at::Tensor> allocate(const std::vector<at::Tensor>& results) const {
    std::vector<at::Tensor> whole;
    for (const auto& result : results) {
      if (!result.defined()) {
        whole.emplace_back();
        continue;
      }
      auto sizes = result.sizes().vec();
      sizes[0] = rows_;
      whole.push_back(
          at::empty(sizes, result.options().requires_grad(false), result.suggest_memory_format()));
    }
    return whole;
  }

  void require_alike(const std::vector<at::Tensor>& results, int64_t end) const {
    TORCH_CHECK_VALUE(results.size() == whole_.size(),
                      "fn returned another number of tensors for rows ", done_, " to ", end,
                      " than for those before (tensors: ", results.size(), " and ", whole_.size(),
                      "); return the same for every piece");
    for (size_t i = 0; i < results.size(); ++i) {
      const auto& now = results[i];
      const auto& before = whole_[i];
      TORCH_CHECK_VALUE(now.defined() == before.defined(),
                        "fn returned another structure for rows ", done_, " to ", end,
                        " than for those before (tensor of the result: ", i,
                        ", defined: ", now.defined(), " and ", before.defined(),
                        "); return the same for every piece");
      if (!now.defined()) {
        continue;
      }
      TORCH_CHECK_VALUE(now.sizes().slice(1) == before.sizes().slice(1) &&
                            now.dtype() == before.dtype() && now.device() == before.device(),
                        "fn returned something else for rows ", done_, " to ", end,
                        " than for those before (tensor of the result: ", i,
                        ", shape: ", now.sizes(), " and [*, ", before.sizes().slice(1),
                        "], dtype: ", now.dtype(), " and ", before.dtype(),
                        ", device: ", now.device(), " and ", before.device(),
                        "); return the same shape of a row for every piece, or pad it");
    }
  }

  Ended make_finer(Retry& retry, const std::string& shortage) {
    const auto count = retry.plan().piece_rows;
    const bool as_it_was = retry.may_do_as_it_was(shortage, options_.device);
    // A row that fitted in an earlier call: a call that remembered nothing would have come to it with retries left.
    const bool again = count == 1 && std::exchange(remembered_, false);
    if (!retry.may_repeat() || (count == 1 && !as_it_was && !again)) {
      throw_too_large(retry, shortage);
    }
    retry.remedy();
    log_repetition({.rank = options_.rank,
                    .what = "map_batches",
                    .rows = rows_,
                    .as_it_was = as_it_was,
                    .pieces = pieces_for(rows_, count),
                    .more = retry.next(options_.device).pieces},
                   retry.attempts().back());
    return {as_it_was ? Ended::How::as_it_was : Ended::How::ran_out, options_.device};
  }

  [[noreturn]] void throw_too_large(const Retry& retry, const std::string& shortage) const {
    const memory::Unlimited unlimited;
    auto shortfall = shortfall_on(options_.device, options_.standing_bytes);
    shortfall.of = Shortfall::Of::mapping;
    shortfall.trains = false;
    shortfall.rank = options_.rank;
    shortfall.world_size = options_.world_size;
    shortfall.rows = rows_;
    shortfall.rows_done = done_;
    shortfall.max_retries = options_.max_retries;
    shortfall.attempts = retry.attempts();
    shortfall.last_error = shortage;
    throw too_large(std::move(shortfall));
  }

  int64_t rows_;
  const MapPiece& piece_;
  const MapTensors& tensors_;
  const MapOptions& options_;
  Undo before_;
  RetryPolicy policy_;
  int64_t peak_bytes_ = 0;   ///< of the last attempt
  bool remembered_ = false;  ///< it began with an earlier call's size, smaller than its own
  int64_t done_ = 0;
  std::vector<at::Tensor> whole_;
};

}  // namespace

std::vector<at::Tensor> map_rows(int64_t rows, const MapPiece& piece, const MapTensors& tensors,
                                 const MapOptions& options, const MapKind& kind) {
  const at::NoGradGuard no_grad;
  Mapping mapping(rows, piece, tensors, options, kind);
  auto whole = mapping.run();
  remember(kind, options.device, mapping.policy());
  return whole;
}

void forget_map_sizes() {
  const std::lock_guard<std::mutex> lock(memos().mutex);
  memos().entries.clear();
}

}  // namespace brimful::detail
