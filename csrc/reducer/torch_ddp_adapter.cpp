#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <brimful/reducer/torch_ddp_adapter.h>
#include <brimful/step/distinct_tensors.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "reducer/at_exit.h"
#include "reducer/side_group.h"
#include "reducer/updates.h"
#include "step/known_loss.h"

namespace brimful {
/// Nothing is launched before finish(), which exchanges the records and reduces if it is due.
struct TorchDdpAdapter::State final : ParticipantAttempt {
  void begin(int source) override { buffer_source = source; }
  void set_order(ParticipantAttempt* /*before*/, ParticipantAttempt* /*after*/) override {}
  void begin_piece(bool /*last*/, const at::Tensor& /*loss*/) override {}
  void advance() override {}
  bool launched_early() const override { return true; }
  /// Never complete: who runs out behind the last gradient repeats, which costs no other rank anything.
  Progress progress() const override { return {}; }
  void launch_early(Fill /*fill*/) override {}
  void launch_last(Fill /*fill*/, const Announcement& announcement) override {
    said = with_known_loss(announcement);
  }
  /// @throws RankFailed if either fails; the ranks that are in it then wait until their group's timeout
  Ending finish() override;
  void abandon() override;
  void accept(double scale, bool keep_unused) override;
  void discard() override;

  void join(const Group& side_group);
  std::vector<ControlRecord> exchange_all(const ControlRecord& record, const std::string& what);
  void reduce_gradients();

  std::vector<at::Tensor> parameters;
  std::optional<SideGroup> ranks;
  Reduce reduce;
  Follow follow;
  bool check_updates = true;
  int buffer_source = 0;
  Announcement said;
  std::vector<uint8_t> used_by_rank;  ///< by parameter: a rank had a gradient
  std::optional<Updates> updates;
};

TorchDdpAdapter::TorchDdpAdapter(std::unique_ptr<State> state) : s_(std::move(state)) {}
TorchDdpAdapter::~TorchDdpAdapter() {
  forget_at_exit(this);
}

std::shared_ptr<TorchDdpAdapter> TorchDdpAdapter::create(std::vector<at::Tensor> parameters,
                                                         const Group& side_group, Reduce reduce,
                                                         bool check_updates, Follow follow) {
  TORCH_CHECK_VALUE(side_group,
                    "ranks agree over a group of their own (side_group: null); make one with gloo");
  auto state = std::make_unique<State>();
  state->parameters = distinct_tensors(std::move(parameters));
  state->reduce = std::move(reduce);
  state->follow = std::move(follow);
  state->check_updates = check_updates;
  state->join(side_group);
  std::shared_ptr<TorchDdpAdapter> reducer(new TorchDdpAdapter(std::move(state)));
  release_at_exit(reducer.get(), [weak = std::weak_ptr<TorchDdpAdapter>(reducer)] {
    if (const auto alive = weak.lock()) {
      alive->s_->ranks->release();
      alive->s_->reduce = nullptr;
      alive->s_->follow = nullptr;
    }
  });
  return reducer;
}

void TorchDdpAdapter::State::join(const Group& side_group) {
  ranks.emplace(side_group, "torch_ddp");
  updates.reset();
  if (check_updates && ranks->world_size() > 1 && !parameters.empty()) {
    updates.emplace(parameters, parameters.front().device(), std::vector<bool>{}, "the BatchSizer");
  }
}

bool TorchDdpAdapter::follow_group() {
  const auto group = s_->follow ? s_->follow() : Group();
  if (group) {
    s_->join(group);
  }
  return group != nullptr;
}

int TorchDdpAdapter::rank() const {
  return s_->ranks->rank();
}

int TorchDdpAdapter::world_size() const {
  return s_->ranks->world_size();
}

int64_t TorchDdpAdapter::step() const {
  return s_->ranks->step();
}

const std::vector<at::Tensor>& TorchDdpAdapter::parameters() const {
  return s_->parameters;
}

const FailureBoard& TorchDdpAdapter::board() const {
  return s_->ranks->board();
}

ParticipantAttempt& TorchDdpAdapter::attempt() {
  return *s_;
}

std::vector<ControlRecord> TorchDdpAdapter::exchange(const ControlRecord& record) {
  return s_->exchange_all(record, "their first batches");
}

std::vector<at::Tensor> TorchDdpAdapter::gather(const at::Tensor& own) {
  return s_->ranks->gather(own);
}

void TorchDdpAdapter::sum(at::Tensor& tensor) {
  s_->ranks->sum(tensor);
}

// A rank's record, and a byte for each parameter: has it a gradient?
std::vector<ControlRecord> TorchDdpAdapter::State::exchange_all(const ControlRecord& record,
                                                                const std::string& what) {
  std::vector<uint8_t> own(kRecordBytes + parameters.size());
  const auto encoded = encode(record);
  std::copy(encoded.begin(), encoded.end(), own.begin());
  for (size_t i = 0; i < parameters.size(); ++i) {
    own[kRecordBytes + i] = parameters[i].grad().defined() ? 1 : 0;
  }
  const auto all = ranks->exchange(own, what);
  std::vector<ControlRecord> records;
  used_by_rank.assign(parameters.size(), 0);
  for (const auto& bytes : all) {
    records.push_back(decode_first(bytes));
    for (size_t i = 0; i < parameters.size(); ++i) {
      used_by_rank[i] |= bytes[kRecordBytes + i];
    }
  }
  return records;
}

Ending TorchDdpAdapter::State::finish() {
  auto record = std::exchange(said, {}).record;
  record.updated.fill(updates ? kUpdateUnknown : kUpdateNotCompared);
  if (updates && record.verdict < Status::retry) {
    if (const auto updated = updates->look(record.updated); updated.defined()) {
      const auto on_host = updated.cpu();
      std::copy_n(on_host.const_data_ptr<uint8_t>(), on_host.numel(), record.updated.begin());
    }
  }
  Ending ending{exchange_all(record, "step " + std::to_string(ranks->step())), {}};
  ranks->next_step();
  const bool stands = worst(ending.records) < Status::retry;
  if (updates) {
    if (stands) {
      updates->settle(ending.records, [&](const ControlRecord& own) {
        return exchange_all(own, "their parameters");
      });
    }
    ending.divergence = updates->divergence();
  }
  if (stands && ending.divergence.empty()) {  // else, on all ranks, nothing is reduced
    reduce_gradients();
  }
  return ending;
}

void TorchDdpAdapter::State::reduce_gradients() {
  const memory::Unlimited unlimited;  // no way back from here
  const memory::UnlimitedEverywhere in_the_groups_threads;
  try {
    reduce(buffer_source);
  } catch (...) {
    const auto failure = failure_of(std::current_exception());
    const auto step = ranks->step() - 1;
    detail::throw_rank_failed(
        -1, step, failure.kind,
        "the gradients of step " + std::to_string(step) +
            " could not be reduced by the module's own DistributedDataParallel (rank " +
            std::to_string(ranks->rank()) +
            "), which cannot be repeated: the other ranks wait in it until its group's timeout. "
            "Start the job again, or wrap the module in brimful.DistributedDataParallel. The "
            "error was: " +
            failure.text);
  }
}

void TorchDdpAdapter::State::accept(double scale, bool keep_unused) {
  const double factor = scale * ranks->world_size();  // it made the mean of what must be the sum
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto& gradient = parameters[i].mutable_grad();
    if (keep_unused && used_by_rank[i] == 0) {
      gradient.reset();
    } else if (gradient.defined() && factor != 1) {
      (gradient.is_sparse() ? gradient._values() : gradient).mul_(factor);
    }
  }
  if (updates) {
    updates->note_gradients();
  }
}

void TorchDdpAdapter::State::discard() {
  for (const auto& parameter : parameters) {
    parameter.mutable_grad().reset();
  }
}

void TorchDdpAdapter::State::abandon() {
  ranks->abandon();
}

}  // namespace brimful
