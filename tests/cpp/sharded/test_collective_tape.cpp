// Collectives that are noted as they are issued, compared with those of the piece before, and issued once more.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "base/thrown_by.h"
#include "sharded/collective_tape.h"
#include "support/catch.h"
#include "support/checks.h"
#include "support/watchdog.h"

#include <brimful/launch/run_ranks.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace test_collective_tape {

using brimful::append_sizes;
using brimful::CallSizes;
using brimful::CollectiveTape;
using brimful::ListeningScope;
using brimful::run_ranks;
using brimful::thrown_by;
using brimful::test::Checks;
using brimful::test::Watchdog;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using State = CollectiveTape::State;

namespace {
at::Tensor largest(const Group& group, double value) {
  std::vector<at::Tensor> tensors{at::full({3}, value)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group->allreduce(tensors, options)->wait();
  return tensors[0];
}

at::Tensor summed(const Group& group, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  group->allreduce(tensors)->wait();
  return tensors[0];
}

/// Whether the values have been freed; gloo's thread may hold them for a moment after a call has ended.
bool is_freed(const c10::weak_intrusive_ptr<c10::StorageImpl>& storage) {
  for (int i = 0; i < 200 && !storage.expired(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return storage.expired();
}

at::Tensor gathered(const Group& group, double value) {
  auto output = at::zeros({2 * group->getSize()});
  auto input = at::full({2}, value);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // its new name is one of torch 2.15
  group->_allgather_base(output, input)->wait();
#pragma GCC diagnostic pop
  return output;
}

struct Piece {
  CollectiveTape& tape;
  Group group;

  void run(const std::function<void()>& collectives) const {
    tape.begin_piece();
    const ListeningScope listens(tape);
    collectives();
    tape.end_piece();
  }
};
}  // namespace

TEST_CASE("What a rank has not issued of a piece is issued for it, as it was", "[sharded]") {
  const Watchdog watchdog("the rest of a piece");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    std::vector<std::string> parted;
    CollectiveTape tape([] { return int64_t{4}; },
                        [&](const std::string& what) { parted.push_back(what); });
    const Piece piece{tape, group};
    const auto whole = [&] {
      largest(group, rank);
      gathered(group, rank);
      largest(group, rank + 10.0);
    };
    piece.run(whole);
    checks.expect(tape.state() == State::written, "one piece writes it");
    piece.run(whole);
    checks.expect(tape.state() == State::holds, "a second one confirms it");
    const auto& entries = tape.entries();
    checks.expect(entries.size() == 3 && entries[1].source == 4, "its entries");
    checks.expect(entries[1].call.gathered_input().numel() == 2, "what a gather sends");
    checks.expect(!entries[0].call.gathered_input().defined(), "a sum gathers nothing");
    checks.expect(entries[0].call.name() == "allreduce_ of [3] Float", entries[0].call.name());
    checks.expect(tape.groups() == std::vector<Group>{group}, "its groups");

    tape.begin_piece();
    if (rank == 0) {
      const ListeningScope listens(tape);
      checks.expect(at::equal(largest(group, -5), at::zeros({3})), "the other's zeros");
      checks.expect(at::equal(gathered(group, 1), at::tensor({1.0F, 1.0F, 8.0F, 8.0F})),
                    "the other's own values");
      checks.expect(at::equal(largest(group, 2), at::full({3}, 2.0)), "the largest, not the sum");
      tape.end_piece();
    } else {
      const auto rest = tape.rest();
      rest.at(0).call.issue({});
      rest.at(1).call.issue(at::full({2}, 8.0));
      rest.at(2).call.issue({});
      tape.forget_piece();
    }
    largest(group, 0);  // outside of pieces it is not noted
    checks.expect(tape.state() == State::holds && parted.empty(), "it holds after that");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A piece with other collectives parts from the tape before it issues them", "[sharded]") {
  enum class Other { kind, operation, more, fewer };
  const auto other = GENERATE(Other::kind, Other::operation, Other::more, Other::fewer);
  const Watchdog watchdog("a piece that parts");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    std::vector<std::string> parted;
    CollectiveTape tape(nullptr, [&](const std::string& what) { parted.push_back(what); });
    const Piece piece{tape, group};
    const auto once = [&] { largest(group, rank); };
    piece.run([&] {  // a first one has what is made once and for all
      gathered(group, rank);
      largest(group, rank);
    });
    piece.run(once);
    checks.expect(tape.state() == State::written, "the first one was another");
    piece.run(once);
    checks.expect(tape.state() == State::holds, "the third is the second");
    std::string words;
    switch (other) {
      case Other::kind:
        piece.run([&] { gathered(group, rank); });
        words =
            "collective 0 of a piece is _allgather_base_ of [4] Float and not allreduce_ of [3] "
            "Float";
        break;
      case Other::operation:
        piece.run([&] { summed(group, at::ones({3})); });
        words = "collective 0 of a piece is allreduce_";
        break;
      case Other::more:
        piece.run([&] {
          largest(group, rank);
          largest(group, rank);
        });
        words = "and not none";
        break;
      case Other::fewer:
        piece.run([] {});
        words = "has ended before its collective 0";
        break;
    }
    checks.expect(parted.size() == 1 && parted[0].find(words) != std::string::npos,
                  parted.empty() ? "nothing was said" : parted[0]);
    checks.expect(tape.state() == State::parted && tape.rest().empty(), "it is parted");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A tape leaves the sizes of calls open that are not a parameter's", "[sharded]") {
  const Watchdog watchdog("sizes that follow the rows");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    std::vector<std::string> parted;
    std::vector<CallSizes> seen;
    CollectiveTape tape([] { return int64_t{-1}; },
                        [&](const std::string& what) { parted.push_back(what); },
                        [&](size_t, const auto& op, const auto& arguments) {
                          append_sizes(op, arguments, seen.emplace_back());
                        });
    const Piece piece{tape, group};
    const auto sum = [&](const at::Tensor& tensor) { piece.run([&] { summed(group, tensor); }); };
    sum(at::ones({2, 3}));
    sum(at::ones({2, 3}));
    checks.expect(tape.state() == State::holds && seen.empty(), "it holds");
    sum(at::ones({5, 7}));
    checks.expect(tape.state() == State::holds && parted.empty(), "other sizes are the same call");
    checks.expect(seen == std::vector<CallSizes>{{2, 5, 7}}, "whose sizes are noted");
    if (rank == 0) {
      checks.expect(at::equal(summed(group, at::ones({4, 2})), at::ones({4, 2})), "of zeros");
    } else {
      tape.entries().at(0).call.issue_sized({2, 4, 2});
    }
    for (const CallSizes& wrong : {CallSizes{}, CallSizes{3, 1, 1}, CallSizes{1, 2, 1, 2}}) {
      const auto error = thrown_by([&] { tape.entries().at(0).call.issue_sized(wrong); });
      checks.expect(error != nullptr, "sizes of other tensors are refused");
    }
    sum(at::ones({2}, at::kDouble));
    checks.expect(tape.state() == State::parted, "another dtype is another call");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A piece that is noted holds no values longer", "[sharded]") {
  const Watchdog watchdog("values of a piece");
  Checks checks;
  run_ranks({2}, [&](int, const Group& group) {
    CollectiveTape tape([] { return int64_t{-1}; }, nullptr);
    const Piece piece{tape, group};
    for (int i = 0; i < 3; ++i) {
      piece.run([&] {
        auto values = at::ones({64});
        const auto storage = values.storage().getWeakStorageImpl();
        summed(group, values);
        values.reset();
        checks.expect(is_freed(storage), "within piece " + std::to_string(i));
      });
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

}  // namespace test_collective_tape
