// What the participants of a step do in which order, and that all of them end.
#include <brimful/step/step.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "step/failure_board.h"
#include "support/catch.h"

namespace test_attempts {

using brimful::Announcement;
using brimful::ControlRecord;
using brimful::Ending;
using brimful::FailureBoard;
using brimful::Fill;
using brimful::ParticipantAttempt;
using brimful::Status;
using brimful::StepGroup;
using Calls = std::vector<std::string>;

/// Notes what it is asked to do.
class Part final : public brimful::Participant, private ParticipantAttempt {
 public:
  Part(std::string name, Calls& calls) : name_(std::move(name)), calls_(calls) {}
  Ending ending{{ControlRecord{}}, {}};
  bool breaks = false;

  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  int64_t step() const override { return 0; }
  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  const FailureBoard& board() const override { return board_; }
  std::vector<ControlRecord> exchange(const ControlRecord& record) override { return {record}; }
  std::vector<at::Tensor> gather(const at::Tensor& own) override { return {own}; }
  void sum(at::Tensor& /*tensor*/) override {}
  ParticipantAttempt& attempt() override { return *this; }

 private:
  void note(const char* what) { calls_.push_back(name_ + what); }
  void begin(int /*buffer_source*/) override { note(" begins"); }
  void set_order(ParticipantAttempt* /*before*/, ParticipantAttempt* /*after*/) override {}
  void begin_piece(bool /*last*/, const at::Tensor& /*loss*/) override {}
  void advance() override {}
  bool launched_early() const override { return true; }
  brimful::Progress progress() const override { return {}; }
  void launch_early(Fill /*fill*/) override { note(" early"); }
  void launch_last(Fill /*fill*/, const Announcement& /*said*/) override { note(" last"); }
  Ending finish() override {
    note(" ends");
    if (breaks) {
      throw std::runtime_error(name_ + " broke");
    }
    return ending;
  }
  void abandon() override {}
  void accept(double /*scale*/, bool /*keep_unused*/) override {}
  void discard() override {}

  std::string name_;
  Calls& calls_;
  std::vector<at::Tensor> parameters_;
  FailureBoard board_{nullptr, ""};
};

TEST_CASE("The early buckets of all participants come before the first last one") {
  Calls calls;
  StepGroup group({std::make_shared<Part>("a", calls), std::make_shared<Part>("b", calls)}, {});
  group.begin_attempt(0);
  group.complete({});
  group.finish();
  CHECK(calls == Calls{"a begins", "b begins", "a early", "b early", "a last", "b last", "a ends",
                       "b ends"});
}

TEST_CASE("All participants of a step end, though the first one's group broke") {
  Calls calls;
  const auto first = std::make_shared<Part>("a", calls);
  const auto second = std::make_shared<Part>("b", calls);
  first->breaks = second->breaks = true;
  StepGroup group({first, second}, {});
  CHECK_THROWS_WITH(group.finish(), "a broke");
  CHECK(calls == Calls{"a ends", "b ends"});
}

TEST_CASE("A rank's verdict is the worst of its participants', the divergence the first one's") {
  Calls calls;
  const auto first = std::make_shared<Part>("a", calls);
  const auto second = std::make_shared<Part>("b", calls);
  second->ending.records[0].verdict = Status::out_of_memory;
  second->ending.divergence = "they differ";
  StepGroup group({first, second}, {});
  CHECK(group.finish().at(0).verdict == Status::out_of_memory);
  CHECK(group.divergence() == "they differ");
}

}  // namespace test_attempts
