#include "reducer/shared_step.h"

#include <brimful/memory/stats.h>
#include <brimful/step/control_record.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <utility>

#include "base/fnv.h"
#include "step/failures.h"

namespace brimful {
namespace {
/// gloo ends a process whose peer sends another size.
std::vector<uint8_t> as_record(const Turn& turn) {
  static_assert(sizeof(Turn) <= kRecordBytes);
  std::vector<uint8_t> bytes(kRecordBytes);
  std::memcpy(bytes.data(), &turn, sizeof(turn));
  return bytes;
}

bool is_same_step(const Turn& one, const Turn& other) {
  return one.kind == other.kind && one.number == other.number && one.detail == other.detail;
}
}  // namespace

void SharedStep::agree(GroupLink& link, Turn own) {
  own.others = reducers_beside({}, link.group.get()).size() - 1;
  number_ = link.traffic->turns++;
  link.begin_wait();
  link.call([&] {
    const memory::Unlimited unlimited;
    link.require(link.device);
    const auto all = exchange_bytes(link.group, link.device, as_record(own),
                                    [&](c10d::Work& work) { link.wait_for(work, link.device); });
    said_.clear();
    bool others = false;
    for (const auto& bytes : all) {
      auto& theirs = said_.emplace_back();
      std::memcpy(&theirs, bytes.data(), sizeof(theirs));
      ended_ = ended_ || !is_same_step(theirs, own);
      others = others || theirs.others > 0;
    }
    if (!ended_ && !others && own.kind != TurnKind::plain) {
      link.traffic->several = false;  // they have died on all ranks, as all ranks have read
    }
  });
  link.traffic->agreeing_ms +=
      std::chrono::duration<double, std::milli>(GroupLink::Clock::now() - link.waiting_since())
          .count();
}

void SharedStep::open(GroupLink& link, bool managed) {
  if (!managed) {
    agree(link, {TurnKind::plain, link.number});
  } else if (!std::exchange(opened_, true)) {  // it is for all reducers of the step
    Turn own{TurnKind::managed, link.number};
    Fnv<uint64_t> hash;
    for (const auto number : numbers_) {
      hash.add(number);
      own.detail = hash.value();
    }
    agree(link, own);
  }
}

bool SharedStep::close(GroupLink& link) {
  if (!closed_ && !ended_ && link.takes_turns()) {
    agree(link, {TurnKind::close});
    closed_ = true;
  }
  return !ended_;
}

bool SharedStep::open_exchange(GroupLink& link) {
  if (link.takes_turns()) {
    agree(link, {TurnKind::exchange, link.number});
  }
  return !ended_;
}

void SharedStep::throw_ended(const std::function<void()>& raise) {
  thrown_ = thrown_ ? thrown_ : thrown_by(raise);
  std::rethrow_exception(thrown_);
}

void SharedStep::share_error(GroupLink& link) {
  error_ = error_ ? error_ : link.error();
  link.fail(error_);
}

void SharedStep::part(GroupLink& link, FailureKind kind) {
  auto unlimited = std::make_shared<memory::UnlimitedEverywhere>();
  number_ = link.traffic->turns++;
  parting_number_ = link.number;
  parting_ =
      begin_exchange(link.group, link.device,
                     as_record({TurnKind::failed, link.number, static_cast<uint64_t>(kind), 1}));
  // The group's thread allocates when it comes to it, which is after buckets that wait for other ranks.
  if (auto future = link.device.is_cpu() ? parting_->work->getFuture() : nullptr) {
    future->addCallback(
        [held = std::move(unlimited)](c10::ivalue::Future&) mutable { held.reset(); });
  }
}

void SharedStep::wait_for_parting(GroupLink& link) {
  link.begin_wait();
  link.call([&] { link.wait_for(*parting_->work, link.device); });
}

/// On the board, of a step that died where several reducers take turns.
std::string SharedStep::place_of(int rank) const {
  return "turn/" + std::to_string(number_) + "/" + std::to_string(rank);
}

void SharedStep::post_parting(const GroupLink& link, const Failure& failure) const {
  board_of(link, parting_number_).try_post(place_of(link.rank), failure);
}

Failure SharedStep::failure_of(const GroupLink& link, const Turn& turn, int rank) const {
  return posted_failure(board_of(link, turn.number), place_of(rank), rank,
                        static_cast<Status>(turn.detail));
}

}  // namespace brimful
