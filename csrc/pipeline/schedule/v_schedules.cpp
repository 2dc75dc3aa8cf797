#include "pipeline/schedule/v_schedules.h"

#include <algorithm>
#include <deque>

#include "pipeline/schedule/rank_order.h"

namespace brimful::pipeline {
namespace {
constexpr auto F = ActionKind::forward;
constexpr auto B = ActionKind::backward;
constexpr auto I = ActionKind::backward_input;
constexpr auto W = ActionKind::backward_weight;

template <typename Body>
void repeat(int times, const Body& body) {
  for (int i = 0; i < times; ++i) {
    body(i);
  }
}

/// DualPipeV's rank, phase by phase. Ws that were put off are done in the order of their Is.
class DualPipeV {
 public:
  DualPipeV(int rank, int ranks, int microbatches)
      : rank_(rank),
        ranks_(ranks),
        total_(std::max(2 * ranks, microbatches)),
        down_(rank),
        up_(2 * ranks - 1 - rank),
        order_(microbatches) {}

  std::vector<Action> actions() {
    warm_up();
    steady();
    cool_down();
    return order_.take();
  }

 private:
  void warm_up() {
    repeat(2 * (ranks_ - 1 - rank_), [&](int) { order_.add(F, down_); });
    repeat(rank_ + 1, [&](int) {
      order_.add(F, down_);
      order_.add(F, up_);
    });
    repeat(ranks_ - 1 - rank_, [&](int) {
      backward(up_, true);
      weight();
      order_.add(F, up_);
    });
  }

  void steady() {
    repeat(total_ - 2 * ranks_ + rank_ + 1, [&](int) {
      order_.add(F, down_);
      backward(up_, false);
      order_.add(F, up_);
      backward(down_, false);
    });
    repeat(ranks_ - 1 - rank_, [&](int) {
      backward(up_, false);
      order_.add(F, up_);
      backward(down_, false);
    });
  }

  /// The second half of the backwards puts its Ws off to where this rank would wait.
  void cool_down() {
    repeat(rank_ + 1, [&](int i) {
      const int half = (rank_ + 1) / 2;
      backward(up_, i > half || (i == half && rank_ % 2 == 1));
      backward(down_, i >= half);
    });
    repeat(ranks_ - 1 - rank_, [&](int) {
      weight();
      backward(down_, true);
    });
    repeat(rank_ + 1, [&](int) { weight(); });
  }

  void backward(int stage, bool puts_weight_off) {
    if (puts_weight_off) {
      put_off_.push_back({stage, W, order_.count(I, stage)});
    }
    order_.add(puts_weight_off ? I : B, stage);
  }

  void weight() {
    if (!put_off_.empty()) {
      order_.add(put_off_.front());
      put_off_.pop_front();
    }
  }

  int rank_;
  int ranks_;
  int total_;  ///< microbatches of the whole order, of which the last ones may be left out
  int down_;   ///< the stage on the V's first half
  int up_;
  RankOrder order_;
  std::deque<Action> put_off_;
};
}  // namespace

std::vector<Action> zbv_rank(int rank, int ranks, int microbatches) {
  const int total = std::max(2 * ranks - 1, microbatches);
  const int down = rank;
  const int up = 2 * ranks - 1 - rank;
  RankOrder order(microbatches);
  const auto backward_of = [&](int stage) {
    order.add(I, stage);
    order.add(W, stage);
  };
  repeat(2 * (ranks - rank) - 1, [&](int) { order.add(F, down); });
  repeat(rank, [&](int) {
    order.add(F, up);
    order.add(F, down);
  });
  repeat(ranks - rank, [&](int) {
    order.add(F, up);
    backward_of(up);
  });
  while (order.count(F, up) < total) {
    if (order.count(F, down) < total) {
      order.add(F, down);
    }
    backward_of(down);
    order.add(F, up);
    backward_of(up);
  }
  repeat(rank, [&](int) {
    order.add(I, down);
    order.add(I, up);
  });
  repeat(ranks - rank, [&](int) { backward_of(down); });
  for (const int stage : {up, down}) {
    repeat(order.count(I, stage) - order.count(W, stage), [&](int) { order.add(W, stage); });
  }
  return order.take();
}

std::vector<Action> dualpipev_rank(int rank, int ranks, int microbatches) {
  return DualPipeV(rank, ranks, microbatches).actions();
}

}  // namespace brimful::pipeline
