#include <brimful/error.h>

namespace brimful {
namespace {
c10::SourceLocation here() {
  return {"brimful", "brimful", 0};
}

detail::RankFailedThrower& thrower() {
  static detail::RankFailedThrower instance;
  return instance;
}

detail::PlanMismatchThrower& mismatch_thrower() {
  static detail::PlanMismatchThrower instance;
  return instance;
}
}  // namespace

RankFailed::RankFailed(int rank, int64_t step, FailureKind kind, const std::string& message)
    : c10::Error(here(), message), rank_(rank), step_(step), kind_(kind) {}

RankOutOfMemory::RankOutOfMemory(int rank, int64_t step, const std::string& message)
    : RankFailed(rank, step, Status::out_of_memory, message) {}

BatchTooLarge::BatchTooLarge(const std::string& message, TooLargeFacts facts)
    : c10::OutOfMemoryError(here(), message), facts_(std::move(facts)) {}

HalfStepError::HalfStepError(const std::string& message) : c10::Error(here(), message) {}

PlanMismatch::PlanMismatch(const std::string& message) : c10::ValueError(here(), message) {}

namespace detail {
void set_rank_failed_thrower(RankFailedThrower new_thrower) {
  thrower() = std::move(new_thrower);
}

void throw_rank_failed(int rank, int64_t step, FailureKind kind, const std::string& message) {
  const auto raise = [](const auto& error) {
    if (thrower()) {
      thrower()(error);
    }
    throw error;
  };
  if (kind == Status::out_of_memory) {
    raise(RankOutOfMemory(rank, step, message));
  }
  raise(RankFailed(rank, step, kind, message));
  std::abort();  // not reached: raise throws
}

void set_plan_mismatch_thrower(PlanMismatchThrower new_thrower) {
  mismatch_thrower() = std::move(new_thrower);
}

void throw_plan_mismatch(const std::string& message) {
  const PlanMismatch error(message);
  if (mismatch_thrower()) {
    mismatch_thrower()(error);
  }
  throw error;
}
}  // namespace detail
}  // namespace brimful
