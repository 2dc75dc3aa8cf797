// What a step of many ranks costs each of them beside its work, in seconds: `program record|rule|cost RANKS ROUNDS`. One line a round:
// "record": writing the last bucket's tail, reading it, and what is asked of the records; "rule": shares after a step, with the speeds of simulate.py;
// "cost": the rows of a step by cost, and shares after it, with about 340 tokens a rank.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <brimful/launch/global_sampler.h>
#include <brimful/step/control_record.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "launch/share_rule.h"
#include "reducer/tail.h"

namespace {

constexpr int64_t kParameters = 16;
constexpr int64_t kRows = 64;  // of a rank

double seconds_of(const auto& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// As a BatchSizer asks after a step.
double ask(const std::vector<brimful::ControlRecord>& records) {
  double sum = static_cast<double>(brimful::worst(records)) + brimful::total_weight(records) +
               brimful::mean_loss(records) + brimful::next_total_weight(records);
  sum += static_cast<double>(brimful::ranks_with_another_ref(records).size());
  sum += brimful::no_rank_steps(records) ? 1 : 0;
  sum += brimful::updated_alike(records) ? 1 : 0;
  return sum + brimful::next_buffer_source(records);
}

void time_record(int ranks, int rounds) {
  brimful::Tail tail({kParameters, 0, 0, ranks}, {}, at::kFloat);
  tail.attach(at::zeros({tail.numel()}));
  const std::vector<uint8_t> used(kParameters, 1);
  brimful::Announcement said;
  said.record.verdict = brimful::Status::ok;
  said.record.weight = kRows;
  double asked = 0;
  for (int round = 0; round < rounds; ++round) {
    const double write = seconds_of([&] { tail.write({used, said, {}, {}}); });
    const double read = seconds_of([&] { tail.head().read(); });
    const double questions = seconds_of([&] { asked += ask(tail.head().records()); });
    std::printf(
        "%lld %.9f %.9f %.9f\n",
        static_cast<long long>(tail.numel() - kParameters) * static_cast<long long>(sizeof(float)),
        write, read, questions);
  }
  std::fprintf(stderr, "%g\n", asked);  // is not left out
}

void time_rule(int ranks, int rounds) {
  std::mt19937_64 random(0);  // NOLINT(cert-msc32-c,cert-msc51-cpp): alike each time
  std::lognormal_distribution<double> slowness(0, 0.05);
  std::lognormal_distribution<double> jitter(0, 0.02);
  std::vector<double> ms_per_row(ranks);
  for (auto& ms : ms_per_row) {
    ms = slowness(random);
  }
  const brimful::launch::ShareBounds bounds{std::vector<int64_t>(ranks, 1),
                                            std::vector<int64_t>(ranks, kRows * ranks)};
  brimful::launch::ShareHistory history;
  history.shares.assign(ranks, kRows);
  for (int round = 0; round < rounds; ++round) {
    const auto rows = history.shares;
    std::vector<double> work_ms;
    for (int rank = 0; rank < ranks; ++rank) {
      work_ms.push_back(static_cast<double>(rows[rank]) * ms_per_row[rank] * jitter(random));
    }
    const double taken =
        seconds_of([&] { brimful::launch::note_step(history, rows, work_ms, /*lag=*/2, bounds); });
    std::printf("%.9f\n", taken);
  }
}

void time_cost(int ranks, int rounds) {
  constexpr int64_t kTokens = 340;      // of a rank's rows
  constexpr int64_t kTokensOfRow = 80;  // less than the mean, so that there are enough rows
  std::mt19937_64 random(0);            // NOLINT(cert-msc32-c,cert-msc51-cpp): alike each time
  std::lognormal_distribution<double> length(std::log(64), 0.8);
  std::lognormal_distribution<double> jitter(0, 0.02);
  brimful::RowCosts costs{{}, kTokens * ranks};
  costs.of_row.resize((rounds + 1) * costs.of_batch / kTokensOfRow);
  for (auto& cost : costs.of_row) {
    cost = std::clamp<int64_t>(static_cast<int64_t>(length(random)), 1, 2048);
  }
  brimful::GlobalSampler sampler(std::move(costs), 0, ranks);
  sampler.reset();
  sampler.shares();  // makes the epoch's order
  for (int round = 0; round < rounds; ++round) {
    std::vector<double> work_ms(ranks);
    std::generate(work_ms.begin(), work_ms.end(), [&] { return jitter(random); });
    const double taken = seconds_of([&] {
      sampler.next();
      sampler.note(work_ms);
    });
    std::printf("%.9f\n", taken);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s record|rule|cost RANKS ROUNDS\n", argv[0]);
    return 2;
  }
  at::set_num_threads(1);
  const std::string mode = argv[1];
  (mode == "record" ? time_record
   : mode == "cost" ? time_cost
                    : time_rule)(std::stoi(argv[2]), std::stoi(argv[3]));
  return 0;
}
