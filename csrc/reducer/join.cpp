// Uneven data in a plain loop: a rank without more data makes the calls of the others' steps.
#include "reducer/join.h"

#include <algorithm>
#include <utility>

#include "reducer/group_calls.h"

namespace brimful {

void UnevenData::begin(bool mean_of_active, bool throw_early) {
  mean_of_active_ = mean_of_active;
  throw_early_ = throw_early;
  active_.clear();
  engine_.attempt().set_uneven(true);
}

void UnevenData::end() {
  begin(false, false);
  engine_.attempt().set_uneven(false);
}

// Not an all_reduce, for the reason in agree.cpp.
std::vector<uint8_t> UnevenData::ask_all(bool own, const std::string& what) {
  engine_.open_exchange(/*settles=*/false);
  std::vector<uint8_t> answers;
  for (const auto& bytes : engine_.link().exchange({static_cast<uint8_t>(own ? 1 : 0)},
                                                   engine_.attempt().step(), what)) {
    answers.push_back(bytes[0]);
  }
  return answers;
}

bool UnevenData::any_rank(bool own, const std::string& what) {
  const auto answers = ask_all(own, what);
  return std::any_of(answers.begin(), answers.end(), [](auto answer) { return answer != 0; });
}

/// The ranks with data, if that ends the loop: those that go on expect the others.
int64_t UnevenData::left_early(int64_t with_data) const {
  return throw_early_ && with_data < engine_.link().world_size ? with_data : 0;
}

int64_t UnevenData::remaining(bool has_data) {
  if (!throw_early_ || engine_.link().world_size == 1 || engine_.attempt().is_managed()) {
    return 0;
  }
  const auto answers = ask_all(has_data, "whether all ranks have data");
  return left_early(std::count(answers.begin(), answers.end(), uint8_t{1}));
}

int64_t UnevenData::note_data(const std::vector<ControlRecord>& records) {
  std::vector<int> active;
  for (int rank = 0; rank < std::ssize(records); ++rank) {
    if (records[rank].verdict == Status::ok) {
      active.push_back(rank);
    }
  }
  if (const auto with_data = left_early(std::ssize(active))) {
    return with_data;
  }
  if (!active.empty()) {
    active_ = std::move(active);
  }
  return 0;
}

double UnevenData::averaged_over() const {
  const bool fewer = mean_of_active_ && !active_.empty();
  return fewer ? static_cast<double>(active_.size()) : engine_.link().world_size;
}

// A rank that has left comes to the next step at once, while the others may be in a forward that makes collectives of its
// own: over gloo a bucket that meets one of those ends the process. A barrier has no size to differ, and waits beside
// backward. Where ranks ask before each forward, none is in one alone.
void UnevenData::meet() {
  auto& link = engine_.link();
  if (!engine_.attempt().is_uneven() || throw_early_ || link.world_size == 1 ||
      !link.device.is_cpu() || link.is_broken()) {
    return;
  }
  link.count(&Reducer::Counters::exchanges);
  const WithoutPythonObjects without;
  c10d::BarrierOptions options;
  options.device = link.device;
  link.call([&] { met_ = link.group->barrier(options); });
}

void UnevenData::wait_for_all() {
  auto& link = engine_.link();
  link.begin_wait();
  if (met_) {
    link.call([&] { link.wait_for(*met_, link.device); });
  }
}

void UnevenData::throw_ended(int64_t with_data) const {
  TORCH_CHECK(false, "data ended on some ranks (ranks that have more: ", with_data, " of ",
              engine_.link().world_size,
              "; throw_on_early_termination: true); end the epoch on this rank too");
}

}  // namespace brimful
