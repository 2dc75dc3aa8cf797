// What a rank owes the others of a sharded model's step, whether its own pieces run or fail.
#include "sharded/sharded_state.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/step/distinct_tensors.h>
#include <brimful/step/oom.h>

#include <algorithm>

#include "reducer/updates.h"
#include "sharded/break_group.h"
#include "sharded/count_once.h"
#include "step/known_loss.h"

namespace brimful {
namespace {
/// On the board, by the first rank that is there.
constexpr const char* kParted = "parted";

std::string draining_place(int64_t step) {
  return "drains/" + std::to_string(step);
}

/// Nothing where the store is gone: then a rank is, too, and the connections show it.
std::optional<Failure> found_on(const FailureBoard& board, const std::string& place) noexcept {
  try {
    return board.find(place);
  } catch (...) {
    return std::nullopt;
  }
}

/// What this rank gives to a gather; undefined for all else, or if that is not known.
at::Tensor shard_for(const ShardedModelHooks& hooks, const CollectiveTape::Entry& entry) {
  const auto like = entry.call.gathered_input();
  if (!like.defined()) {
    return {};
  }
  const auto shard = hooks.shard_of(entry.source);
  return shard.defined() && shard.numel() == like.numel()
             ? shard.to(like.scalar_type()).view(like.sizes())
             : at::Tensor();
}
}  // namespace

ShardedModel::State::State(std::vector<at::Tensor> parameters, const Group& side_group,
                           ShardedModelHooks hooks, std::vector<int> rows_of)
    : parameters_(distinct_tensors(std::move(parameters))),
      hooks_(std::move(hooks)),
      rows_of_(std::move(rows_of)),
      sized_(hooks_.members_of),
      tape_([this] { return hooks_.source_of_call(); },
            [this](const std::string& what) { on_parting(what); },
            [this](size_t at, const auto& op, const auto& arguments) {
              sized_.note(issued_ + static_cast<int64_t>(at), op, arguments);
            }),
      ranks_(side_group, "sharded") {
  const auto world_size = static_cast<size_t>(ranks_.world_size());
  TORCH_CHECK_VALUE(rows_of_.empty() || rows_of_.size() == world_size,
                    "each rank says whose rows it has (rows_of: ", rows_of_.size(),
                    ", ranks: ", world_size, ")");
  ranks_.connect_hosts(kRecordBytes, [this] { abort_groups(); });
}

void ShardedModel::State::begin(int /*buffer_source*/) {
  listens_.reset();
  tape_.forget_piece();
  begun_ = 0;
  issued_ = 0;
  sized_.begin(ranks_.step());
  hooks_.in_attempt(true);
}

void ShardedModel::State::begin_forward() {
  end_pieces();
  ++begun_;
  tape_.begin_piece();
  if (!listens_ && !ranks_.is_alone()) {
    listens_.emplace(tape_);
  }
}

void ShardedModel::State::end_pieces() {
  if (begun_ > 0) {
    tape_.end_piece();
    issued_ += tape_.issued();
    tape_.forget_piece();
  }
}

Progress ShardedModel::State::progress() const {
  Progress progress;
  progress.launched = issued_ + tape_.issued();
  return progress;
}

void ShardedModel::State::launch_early(Fill fill) {
  if (fill == Fill::gradients) {
    end_pieces();
    listens_.reset();
    sized_.close(issued_);
    return;
  }
  listens_.reset();
  sized_.close(issued_ + tape_.issued());
  if (ranks_.is_alone()) {
    return;
  }
  if (learning_ == Learning::not_begun) {
    ControlRecord failed;
    failed.verdict = Status::error;
    ranks_.exchange_record(failed, "their first pieces");  // the others begin their step with it
    learning_ = Learning::refused;
  } else if (inner_collectives() == InnerCollectives::known) {
    drain();
  } else if (learning_ != Learning::refused) {
    fail("this rank failed, and what the others wait for is not known");
  }
}

void ShardedModel::State::drain() {
  const auto& board = ranks_.board();
  Failure drains;
  drains.rank = ranks_.rank();
  drains.step = ranks_.step();
  board.try_post(draining_place(ranks_.step()), drains);
  if (const auto parted = found_on(board, kParted)) {
    fail("this rank failed, and rank " + std::to_string(parted->rank) +
         " makes other collectives in this step than in the ones before: " + parted->text);
  }
  std::string failed;
  try {
    issue_rest();
  } catch (...) {
    failed = to_string(std::current_exception());
  }
  if (!failed.empty()) {
    fail("this rank failed, and what the others wait for could not be issued: " + failed);
  }
}

void ShardedModel::State::issue_rest() {
  const at::NoGradGuard no_grad;
  const memory::Unlimited unlimited;  // all other ranks wait for it
  const memory::UnlimitedEverywhere in_the_groups_threads;
  const auto rest = tape_.rest();
  auto index = issued_ + tape_.issued();
  hooks_.reset();  // what the piece held is free before the first of them needs room
  const auto issue = [&](const CollectiveTape::Entry& entry) {
    if (entry.is_sized()) {
      sized_.issue(entry.call, index, [this] {
        TORCH_CHECK(!broken_, "the groups of the model were aborted meanwhile");
      });
    } else {
      entry.call.issue(shard_for(hooks_, entry));  // nothing has begun if its tensors have no room
    }
    ++index;
    ++drained_;
  };
  std::for_each(rest.begin(), rest.end(), issue);
  for (; begun_ < pieces_; ++begun_) {
    std::for_each(tape_.entries().begin(), tape_.entries().end(), issue);
  }
  tape_.forget_piece();
  tape_.let_go();
}

void ShardedModel::State::launch_last(Fill /*fill*/, const Announcement& said) {
  said_ = with_known_loss(said);
}

std::vector<ControlRecord> ShardedModel::State::exchange(const ControlRecord& record,
                                                         const std::string& what) {
  auto records = ranks_.exchange_record(record, what);
  pieces_ = wanted_pieces(records);
  const auto differ = count_once(records, rows_of_);
  TORCH_CHECK_VALUE(differ.empty() || is_failure(worst(records)), differ);
  return records;
}

Ending ShardedModel::State::finish() {
  listens_.reset();
  hooks_.in_attempt(false);
  auto record = std::exchange(said_, {}).record;
  record.updated.fill(kUpdateNotCompared);
  Ending ending{ranks_.exchange_record(record, "step " + std::to_string(ranks_.step())), {}};
  pieces_ = wanted_pieces(ending.records);
  auto differ = count_once(ending.records, rows_of_);
  if (worst(ending.records) <= Status::no_data) {  // else they come again
    ending.divergence = std::move(differ);
  }
  ranks_.next_step();
  learning_ = learning_ == Learning::refused ? Learning::not_begun : learning_;
  return ending;
}

void ShardedModel::State::accept(double scale, bool /*keep_unused*/) {
  if (scale == 1) {
    return;
  }
  if (auto gradients = hooks_.gradients(); !gradients.empty()) {
    at::_foreach_mul_(gradients, scale);
  }
}

void ShardedModel::State::discard() {
  if (learning_ == Learning::under_way) {  // of the second piece
    end_pieces();
    begun_ = 0;
  }
  listens_.reset();
  tape_.forget_piece();
  hooks_.in_attempt(false);
  hooks_.reset();
}

InnerCollectives ShardedModel::State::inner_collectives() const {
  if (ranks_.is_alone()) {
    return InnerCollectives::none;
  }
  if (learning_ != Learning::over) {
    return InnerCollectives::unlearned;
  }
  return all_know_ && tape_.state() == CollectiveTape::State::holds ? InnerCollectives::known
                                                                    : InnerCollectives::lost;
}

void ShardedModel::State::begin_learning(bool has_data) {
  ControlRecord own;
  own.verdict = has_data ? Status::ok : Status::no_data;
  const auto records = ranks_.exchange_record(own, "their first pieces");
  if (worst(records) > Status::no_data) {
    learning_ = Learning::refused;
    const auto peer = ranks_.board().find_other(ranks_.step(), ranks_.rank(), ranks_.world_size());
    detail::throw_rank_failed(peer ? peer->rank : -1, ranks_.step(),
                              peer ? peer->kind : Status::error,
                              peer ? "rank " + std::to_string(peer->rank) +
                                         " failed before its first step: " + to_string(*peer)
                                   : "another rank failed before its first step");
  }
  const auto without = ranks_with(records, Status::no_data);
  learning_ = without.empty() ? Learning::under_way : Learning::refused;
  TORCH_CHECK_VALUE(without.empty(),
                    "the first step of a sharded model needs data on all ranks (rank without: ",
                    without.empty() ? -1 : without.front(), "); let a later one be uneven");
}

bool ShardedModel::State::end_learning(bool last) {
  ControlRecord own;
  own.verdict = tape_.state() == CollectiveTape::State::holds ? Status::ok : Status::no_data;
  all_know_ = worst(ranks_.exchange_record(own, "their collectives")) == Status::ok;
  if (all_know_) {
    sized_.take_up(tape_.entries(), ranks_);
  }
  learning_ = all_know_ || last ? Learning::over : learning_;
  if (last && !all_know_) {
    log(LogLevel::warning,
        "the pieces of the model make different collectives: a rank that fails ends the job");
  }
  return all_know_;
}

void ShardedModel::State::on_parting(const std::string& what) {
  if (learning_ != Learning::over) {
    return;
  }
  log(LogLevel::warning, what + ": from now on a rank that fails ends the job");
  Failure parted;
  parted.rank = ranks_.rank();
  parted.step = ranks_.step();
  parted.text = what;
  ranks_.board().try_post(kParted, parted);
  if (const auto drains = found_on(ranks_.board(), draining_place(ranks_.step()))) {
    fail(what + ", and rank " + std::to_string(drains->rank) + " has failed in this step");
  }
}

void ShardedModel::State::abandon() {
  listens_.reset();
  break_all();
}

void ShardedModel::State::break_all() {
  abort_groups();
  ranks_.abandon();
}

void ShardedModel::State::abort_groups() {
  const std::lock_guard lock(breaking_);
  if (broken_.exchange(true)) {
    return;
  }
  for (const auto& group : tape_.groups()) {
    break_group(*group);
  }
}

void ShardedModel::State::fail(const std::string& text) {
  break_all();  // and no more: a thread of autograd may be here, which has not begun to listen
  std::string first;
  {
    const std::lock_guard lock(breaking_);
    first = why_broken_ = why_broken_.empty() ? text : why_broken_;
  }
  detail::throw_rank_failed(-1, ranks_.step(), Status::error,
                            first + " (rank: " + std::to_string(ranks_.rank()) +
                                "); the groups of the model are aborted: start the job again");
}

int64_t ShardedModel::State::collectives() const {
  return inner_collectives() == InnerCollectives::known
             ? static_cast<int64_t>(tape_.entries().size())
             : 0;
}

void ShardedModel::State::release() {
  sized_.release();
  ranks_.release();  // and no thread calls back any more
  hooks_ = {};
}

}  // namespace brimful
