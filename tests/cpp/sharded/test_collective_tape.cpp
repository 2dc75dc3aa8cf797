// Collectives that are noted as they are issued, compared with those of the piece before, and issued once more.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "sharded/collective_tape.h"
#include "support/catch.h"
#include "support/checks.h"
#include "support/watchdog.h"

#include <brimful/launch/run_ranks.h>

#include <functional>
#include <string>
#include <vector>

namespace test_collective_tape {

using brimful::CollectiveTape;
using brimful::ListeningScope;
using brimful::run_ranks;
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
        piece.run([&] {
          std::vector<at::Tensor> tensors{at::ones({3})};
          group->allreduce(tensors)->wait();
        });
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

}  // namespace test_collective_tape
