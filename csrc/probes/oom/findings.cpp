#include <brimful/probes/oom_report.h>

#include <algorithm>
#include <array>

#include "base/format.h"

namespace brimful::probes {
namespace {

using memory::Category;
using memory::Phase;

/// Less than this part of what was needed is no cause.
constexpr int64_t kLeastPart = 10;
/// A sign that a sound program does not show counts from here on, whatever else is large.
constexpr int64_t kSignPart = 5;

int64_t at(const OomFacts& facts, Category category) {
  return facts.by_category[static_cast<size_t>(category)];
}

int64_t needed(const OomFacts& facts) {
  return facts.used_bytes + facts.request_bytes;
}

int64_t short_of(const OomFacts& facts) {
  return facts.limit_bytes ? std::max<int64_t>(0, needed(facts) - *facts.limit_bytes) : 0;
}

int64_t request_in(const OomFacts& facts, Phase phase) {
  return facts.phase == phase ? facts.request_bytes : 0;
}

std::string top_place(const OomFacts& facts, Phase phase) {
  for (const OomSite& site : facts.sites) {
    if (site.phase == phase) {
      return site.place;
    }
  }
  return facts.place;
}

std::string cheaper_batches(const OomFacts& facts) {
  return facts.program && facts.program->uses_sizer
             ? "use a smaller batch"
             : "split the batch (brimful.BatchSizer does it by itself where memory runs out, and "
               "recomputes "
               "or offloads what a single row saves; in a validation brimful.map_batches)";
}

constexpr const char* kUseSdpa =
    "compute attention with torch.nn.functional.scaled_dot_product_attention, whose flash kernels "
    "keep "
    "no scores (nn.MultiheadAttention: need_weights=False), or shorten the sequences, whose square "
    "the "
    "scores need; fewer rows help no further than one row";

class Findings {
 public:
  explicit Findings(const OomFacts& facts) : facts_(facts) {}

  std::vector<OomFinding> take() {
    growth();
    work();
    single_request();
    standing();
    data();
    beside();
    std::stable_sort(found_.begin(), found_.end(),
                     [](const Scored& a, const Scored& b) { return a.score > b.score; });
    std::vector<OomFinding> findings;
    findings.reserve(found_.size());
    for (auto& scored : found_) {
      findings.push_back(std::move(scored.finding));
    }
    return findings;
  }

 private:
  struct Scored {
    int64_t score;
    OomFinding finding;
  };

  bool is_part(int64_t bytes, int64_t part) const {
    return bytes > 0 && bytes >= needed(facts_) / part;
  }

  /// What is a sign of a fault comes before what is merely large.
  void add(OomCause cause, int64_t bytes, bool sign, std::string text, std::string advice) {
    if (is_part(bytes, sign ? kSignPart : kLeastPart)) {
      found_.push_back({bytes + (sign ? needed(facts_) : 0),
                        {cause, bytes, std::move(text), std::move(advice)}});
    }
  }

  void growth() {
    int64_t bytes = 0;
    for (const OomGrowth& line : facts_.growing) {
      bytes += line.bytes;
    }
    if (bytes > 0) {
      const OomGrowth& first = facts_.growing.front();
      add(OomCause::growth, bytes, true,
          "memory grows from step to step: " + format_bytes(bytes) + " of " +
              std::to_string(first.steps) + " steps, most of it from " + first.place,
          "do not keep that line's tensors: sum and store numbers (loss.item()), detach() or bound "
          "what is kept; brimful.LeakFinder names the variable that holds them");
    }
  }

  /// The models that matter, small ones (metrics, losses) left out.
  bool evaluates() const {
    if (!facts_.grad_enabled || !facts_.program || facts_.program->models.empty()) {
      return false;
    }
    const auto& models = facts_.program->models;
    return std::none_of(models.begin(), models.end(), [&](const OomModel& model) {
      return model.training && model.bytes >= models.front().bytes / 2;
    });
  }

  void work() {
    const int64_t flow = facts_.flow_bytes + (facts_.request_flows ? facts_.request_bytes : 0);
    const int64_t bytes =
        at(facts_, Category::activations) + request_in(facts_, Phase::forward) + flow;
    const std::string most =
        format_bytes(bytes) + ", most of them at " + top_place(facts_, Phase::forward);
    if (evaluates()) {
      add(OomCause::no_grad, bytes, false, "evaluation keeps activations for a backward: " + most,
          "run it under torch.no_grad() or torch.inference_mode()");
    } else if (facts_.earlier_forward) {
      const int64_t request = request_in(facts_, Phase::other);
      add(OomCause::large_batch, bytes + request, false,
          "earlier steps fitted, and this one's batch and activations need " +
              format_bytes(bytes + request) + ", most of them at " +
              (request > bytes ? facts_.place : top_place(facts_, Phase::forward)),
          facts_.attention
              ? kUseSdpa
              : "bound the batch's size or the sequences' length, or " + cheaper_batches(facts_));
    } else {
      add(OomCause::activations, bytes, false,
          (flow > 0 ? "activations and their gradients hold " : "activations hold ") + most,
          facts_.attention
              ? kUseSdpa
              : cheaper_batches(facts_) +
                    ", checkpoint activations (torch.utils.checkpoint), or compute in bfloat16 "
                    "(torch.autocast)");
    }
  }

  void single_request() {
    const int64_t bytes = facts_.request_bytes;
    if (facts_.node.starts_with("Embedding")) {
      add(OomCause::embedding_gradient, bytes, true,
          "the embedding's gradient is dense, as large as its table: " + format_bytes(bytes) +
              " (" + facts_.place + ")",
          "use nn.Embedding(..., sparse=True) with SparseAdam or SGD, or a smaller vocabulary");
    }
    const bool computes = facts_.phase == Phase::forward || facts_.phase == Phase::backward;
    if (computes && !facts_.earlier_forward && bytes > needed(facts_) / 2) {
      add(OomCause::temporary, bytes, true,
          "one operator asks for " + format_bytes(bytes) + ", more than all the rest (" +
              facts_.place + ")",
          facts_.attention ? kUseSdpa
                           : "compute that line in chunks, or in a form without so large a result "
                             "(broadcasts, cdist, one_hot, attention written out)");
    }
  }

  void standing() {
    const int64_t state =
        at(facts_, Category::optimizer_state) + request_in(facts_, Phase::optimizer);
    const auto& program = facts_.program;
    const std::string optimizer =
        program && program->optimizers.size() == 1 ? program->optimizers.front() : "the optimizer";
    const bool keeps_history =
        program && std::ranges::find(program->optimizers, "LBFGS") != program->optimizers.end();
    add(OomCause::optimizer_state, state, facts_.phase == Phase::optimizer,
        "the state of " + optimizer + " needs " + format_bytes(state),
        keeps_history
            ? "lower LBFGS's history_size: each entry takes twice the parameters' bytes, up "
              "to history_size (100 by default) of them"
            : "use an optimizer with less state (SGD, Adafactor, 8-bit Adam), foreach=False, or "
              "shard it "
              "over ranks (ZeroRedundancyOptimizer)");
    const int64_t kept = facts_.phase == Phase::forward ? facts_.kept_gradient_bytes : 0;
    add(OomCause::gradients_kept, kept, kept >= short_of(facts_),
        "gradients of the step before still live in this forward: " + format_bytes(kept),
        "call optimizer.zero_grad(set_to_none=True) right behind optimizer.step()");
    models();
  }

  bool is_before_forward() const {
    return !facts_.earlier_forward && facts_.phase == Phase::other &&
           at(facts_, Category::activations) == 0;
  }
  /// Where the program's language does not say it, what is asked for before a forward is the model's.
  bool is_building() const {
    return is_before_forward() && (!facts_.program || facts_.program->building);
  }

  int64_t data_bytes() const {
    return facts_.data_bytes + (is_before_forward() && !is_building() ? facts_.request_bytes : 0);
  }

  void data() {
    const bool asks = facts_.request_bytes > facts_.data_bytes || facts_.data_place.empty();
    add(OomCause::data, data_bytes(), false,
        "tensors of the first step or before it, of no model (data, inputs, results), hold " +
            format_bytes(data_bytes()) + ", most of them at " +
            (asks && data_bytes() > facts_.data_bytes ? facts_.place : facts_.data_place),
        "leave data on disk or on another device and load a batch at a time (a DataLoader, "
        "numpy.memmap), keep it in a smaller dtype, or delete what is not used again");
  }

  /// Of all models but the largest.
  int64_t other_model_bytes() const {
    if (!facts_.program || is_building()) {
      return 0;
    }
    const auto& models = facts_.program->models;
    int64_t bytes = facts_.earlier_forward ? request_in(facts_, Phase::other) : 0;
    for (size_t k = 1; k < models.size(); ++k) {
      bytes += models[k].bytes;
    }
    return models.size() < 2 ? 0 : bytes;
  }

  void models() {
    const bool building = is_building();
    const int64_t others = other_model_bytes();
    const int64_t model = at(facts_, Category::parameters) + at(facts_, Category::buffers) +
                          facts_.step_gradient_bytes - others +
                          (building               ? facts_.request_bytes
                           : facts_.request_flows ? 0
                                                  : request_in(facts_, Phase::backward));
    if (others > 0) {
      const auto& models = facts_.program->models;
      const bool enough = others >= short_of(facts_) && is_part(others, kSignPart);
      add(OomCause::other_model, others, false,
          std::to_string(models.size()) + " models live in this process; beside the largest (" +
              models.front().name + ") they hold " + format_bytes(others),
          "delete those that are not needed (del model, with its optimizer), or move them to "
          "another device");
      if (enough) {  // without them the model would fit
        found_.back().score = std::max(others, model);
      }
    }
    add(OomCause::model, model, building && model >= data_bytes(),
        "the model by itself needs " + format_bytes(model) + " for parameters and gradients",
        "raise the limit (brimful.memory.set_limit), or use a smaller model, bfloat16 parameters, "
        "or shards (FSDP)");
  }

  void beside() {
    if (const auto& arena = facts_.fragmentation;
        arena && arena->free_bytes >= facts_.request_bytes && facts_.request_bytes > 0) {
      add(OomCause::fragmentation, needed(facts_), true,
          "the bytes are there, in fragments: " + format_bytes(arena->free_bytes) +
              " are free, the largest piece has " + format_bytes(arena->largest_free_bytes),
          facts_.expandable_segments
              ? "keep sizes alike (pad batches to few shapes), or take long-lived tensors first"
              : "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True");
    }
    if (facts_.others_bytes && facts_.device != "cpu") {
      add(OomCause::others, *facts_.others_bytes, false,
          "other processes hold " + format_bytes(*facts_.others_bytes) + " of this device",
          "end them, or use another device (brimful.gpus lists them)");
    }
  }

  const OomFacts& facts_;
  std::vector<Scored> found_;
};

}  // namespace

const char* name_of(OomCause cause) {
  constexpr std::array kNames{
      "activations", "large_batch",    "no_grad",         "temporary",
      "growth",      "gradients_kept", "optimizer_state", "embedding_gradient",
      "model",       "other_model",    "fragmentation",   "others",
      "data"};
  return kNames[static_cast<size_t>(cause)];
}

std::vector<OomFinding> findings(const OomFacts& facts) {
  return Findings(facts).take();
}

}  // namespace brimful::probes
