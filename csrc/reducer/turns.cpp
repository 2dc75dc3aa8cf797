#include "reducer/turns.h"

#include <brimful/memory/stats.h>
#include <brimful/step/control_record.h>

#include <chrono>
#include <cstring>

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

void Turns::agree(const Turn& turn) {
  auto own = turn;
  own.others = reducers_beside({}, link.group.get()).size() - 1;
  number = link.traffic->turns++;
  link.waiting_since = GroupLink::Clock::now();
  link.call([&] {
    const memory::Unlimited unlimited;
    link.require(link.device);
    const auto all = exchange_bytes(link.group, link.device, as_record(own),
                                    [&](c10d::Work& work) { link.wait_for(work, link.device); });
    said.clear();
    bool others = false;
    for (const auto& bytes : all) {
      auto& theirs = said.emplace_back();
      std::memcpy(&theirs, bytes.data(), sizeof(theirs));
      ended = ended || !is_same_step(theirs, own);
      others = others || theirs.others > 0;
    }
    if (!ended && !others && own.kind != TurnKind::plain) {
      link.traffic->several = false;  // they have died on all ranks, as all ranks have read
    }
  });
  link.traffic->agreeing_ms +=
      std::chrono::duration<double, std::milli>(GroupLink::Clock::now() - link.waiting_since)
          .count();
}

Exchange Turns::part(FailureKind kind) {
  number = link.traffic->turns++;
  return begin_exchange(link.group, link.device,
                        as_record({TurnKind::failed, link.number, static_cast<uint64_t>(kind), 1}));
}

std::string Turns::place_of(int64_t number, int rank) {
  return "turn/" + std::to_string(number) + "/" + std::to_string(rank);
}

void Turns::share_end_of(const Turns& other) {
  link.broken = link.broken ? link.broken : other.link.broken;
  if (other.ended) {
    ended = true;
    said = other.said;
    number = other.number;
  }
}

}  // namespace brimful
