// How long an exchange of control records between hosts takes, in seconds: `program RANKS ROUNDS`. A line a round, of rank 0.
// Two ranks stand for all: in each round of the exchange a rank sends to the other one, and gets from it, what it would
// send to a rank further away.
#include <brimful/launch/run_ranks.h>
#include <brimful/step/control_record.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "reducer/host_connector.h"
#include "reducer/host_group.h"

namespace {

/// Of so many ranks, of which the other one of two is each.
class Modelled : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  Modelled(c10::intrusive_ptr<c10d::Backend> two, int ranks)
      : Backend(two->getRank(), ranks), two_(std::move(two)), other_(1 - two_->getRank()) {}
  const std::string getBackendName() const override { return "modelled"; }
  WorkPtr send(Tensors& tensors, int /*to*/, int tag) override {
    return two_->send(tensors, other_, tag);
  }
  WorkPtr recv(Tensors& tensors, int /*from*/, int tag) override {
    return two_->recv(tensors, other_, tag);
  }

 private:
  c10::intrusive_ptr<c10d::Backend> two_;
  int other_;
};

/// Both ranks begin at the same time, some time after the last exchange, as after a step's work.
double seconds_of_exchange(brimful::HostGroup& hosts) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kWork = std::chrono::milliseconds(2);
  const std::vector<uint8_t> own(brimful::kRecordBytes, uint8_t{1});
  hosts.begin(own).work->wait();
  const auto now = Clock::now().time_since_epoch();
  std::this_thread::sleep_until(Clock::time_point(now - now % kWork + 2 * kWork));
  const auto begin = Clock::now();
  hosts.begin(own).work->wait();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "program RANKS ROUNDS\n");
    return 2;
  }
  const int ranks = std::stoi(arguments[1]);
  const int rounds = std::stoi(arguments[2]);
  brimful::run_ranks({2}, [&](int rank, const brimful::Group& group) {
    auto two = brimful::HostConnector(group, group->getStore()).connect("hosts");
    brimful::HostGroup hosts(c10::make_intrusive<Modelled>(std::move(two), ranks),
                             brimful::kRecordBytes, std::chrono::seconds(20));
    for (int round = 0; round < rounds; ++round) {
      const double seconds = seconds_of_exchange(hosts);
      if (rank == 0) {
        std::printf("%.9f\n", seconds);
      }
    }
  });
  return 0;
}
