#include "reducer/host_group.h"

#include <ATen/ATen.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/block_sigpipe.h"
#include "base/thrown_by.h"

namespace brimful {
namespace {
constexpr std::chrono::hours kForever{24 * 365};
constexpr std::chrono::milliseconds kLookEvery{500};

/// A message that meets one of another exchange would be taken for it.
int tag_of(uint64_t exchange, size_t round) {
  constexpr uint64_t kRounds = 32;
  constexpr uint64_t kExchanges = uint64_t{1} << 24;
  return static_cast<int>(exchange % kExchanges * kRounds + round);
}
}  // namespace

std::vector<HostRound> rounds_of(int rank, int world_size) {
  std::vector<HostRound> rounds;
  for (int known = 1; known < world_size; known *= 2) {
    rounds.push_back({(rank - known + world_size) % world_size, (rank + known) % world_size, known,
                      std::min(known, world_size - known)});
  }
  return rounds;
}

class HostGroup::Running final : public c10d::Work {
 public:
  Running(std::vector<uint8_t> own, std::vector<at::Tensor> outputs)
      : own_(std::move(own)), outputs_(std::move(outputs)) {}
  const std::vector<uint8_t>& own() const { return own_; }
  /// By rank.
  const std::vector<at::Tensor>& outputs() const { return outputs_; }
  void end(std::exception_ptr error) { finish(std::move(error)); }

 private:
  std::vector<uint8_t> own_;
  std::vector<at::Tensor> outputs_;
};

HostGroup::HostGroup(c10::intrusive_ptr<c10d::Backend> backend, int64_t bytes,
                     std::chrono::milliseconds timeout, Watch watch)
    : backend_(std::move(backend)),
      rank_(backend_->getRank()),
      world_size_(backend_->getSize()),
      bytes_(bytes),
      rounds_(rounds_of(rank_, world_size_)),
      timeout_(timeout),
      watch_(std::move(watch)) {
  const memory::Unlimited unlimited;  // as in begin()
  for (auto& list : lists_) {
    list = at::empty({world_size_, bytes}, at::kByte);
  }
  const BlockSigpipe inherited;
  if (watch_.lost) {
    listener_ = std::thread([this] { listen(); });
  }
  thread_ = std::thread([this] { run(); });
}

HostGroup::~HostGroup() {
  if (watch_.leaves && is_whole()) {
    watch_.leaves();
  }
  abort();
  thread_.join();
  if (listener_.joinable()) {
    listener_.join();
  }
}

Exchange HostGroup::begin(const std::vector<uint8_t>& own) {
  TORCH_INTERNAL_ASSERT(std::ssize(own) == bytes_);
  const memory::Unlimited unlimited;  // the others wait in it
  auto outputs = at::empty({world_size_, bytes_}, at::kByte).unbind();
  auto running = c10::make_intrusive<Running>(own, outputs);
  Exchange exchange{running, std::move(outputs)};
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_) {
    running->end(error_);
  } else {
    queue_.push_back(std::move(running));
    changed_.notify_all();
  }
  return exchange;
}

void HostGroup::expect(c10::intrusive_ptr<c10d::Work> sums) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // The thread looks only between steps that are far apart.
  while (!expected_.empty() && expected_.front().sums->isCompleted()) {
    expected_.pop_front();
  }
  expected_.push_back({std::move(sums), std::chrono::steady_clock::now()});
}

void HostGroup::look_at_sums() {
  while (true) {
    Expected oldest;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (expected_.empty()) {
        return;
      }
      oldest = expected_.front();
    }
    if (!oldest.sums->isCompleted()) {
      TORCH_CHECK(std::chrono::steady_clock::now() - oldest.since < timeout_,
                  "the sums of a step did not end in ", timeout_.count(), " ms");
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    expected_.pop_front();
  }
}

void HostGroup::wait_for_next() {
  const auto is_due = [&] { return error_ || !queue_.empty(); };
  std::unique_lock<std::mutex> lock(mutex_);
  while (watch_.overdue && !changed_.wait_for(lock, kLookEvery, is_due)) {
    lock.unlock();
    if (const auto error = thrown_by([&] { look_at_sums(); })) {
      fail(error);
      abort();  // no connection was lost
      watch_.overdue();
    }
    lock.lock();
  }
  changed_.wait(lock, is_due);
}

void HostGroup::abort() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = true;
  }
  fail(std::make_exception_ptr(std::runtime_error("the exchange between hosts was aborted")));
}

bool HostGroup::is_whole() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !error_;
}

void HostGroup::require_whole() const {
  if (error_) {
    std::rethrow_exception(error_);
  }
}

void HostGroup::fail(std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  error_ = error_ ? error_ : std::move(error);
  for (const auto* messages : {&coming_[0], &coming_[1], &sent_}) {
    for (const auto& message : *messages) {
      message->abort();
    }
  }
  changed_.notify_all();
}

void HostGroup::ask(uint64_t number) {
  const auto turn = number % lists_.size();
  const std::lock_guard<std::mutex> lock(mutex_);
  require_whole();
  coming_[turn].clear();
  for (size_t i = 0; i < rounds_.size(); ++i) {
    const auto& round = rounds_[i];
    std::vector<at::Tensor> into{lists_[turn].narrow(0, round.begin, round.blocks)};
    coming_[turn].push_back(backend_->recv(into, round.from, tag_of(number, i)));
  }
  firsts_.asked = number + 1;
  changed_.notify_all();
}

void HostGroup::wait(const Messages& messages, size_t index) {
  TORCH_CHECK(messages[index]->wait(timeout_), "the exchange between hosts was aborted");
}

void HostGroup::wait_for_first(uint64_t number) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool ended =
      changed_.wait_for(lock, timeout_, [&] { return error_ || firsts_.come > number; });
  require_whole();
  TORCH_CHECK(ended, "another host did not come to an exchange in ", timeout_.count(), " ms");
}

void HostGroup::listen() {
  for (uint64_t number = 0;; ++number) {
    c10::intrusive_ptr<c10d::Work> first;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return error_ || firsts_.asked > number; });
      if (error_) {
        return;
      }
      first = coming_[number % lists_.size()].front();
    }
    if (const auto error = thrown_by([&] {
          TORCH_CHECK(first->wait(kForever), "the exchange between hosts was aborted");
        })) {
      fail(error);
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    firsts_.come = number + 1;
    changed_.notify_all();
  }
}

void HostGroup::make_rounds(const Running& running, uint64_t number) {
  const auto turn = number % lists_.size();
  const auto& list = lists_[turn];
  auto* blocks = list.mutable_data_ptr<uint8_t>();
  std::copy(running.own().begin(), running.own().end(), blocks);
  for (size_t i = 0; i < rounds_.size(); ++i) {
    std::vector<at::Tensor> from{list.narrow(0, 0, rounds_[i].blocks)};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      require_whole();
      sent_.push_back(backend_->send(from, rounds_[i].to, tag_of(number, i)));
    }
    if (i == 0 && listener_.joinable()) {
      wait_for_first(number);
    } else {
      wait(coming_[turn], i);
    }
  }
  for (size_t i = 0; i < sent_.size(); ++i) {
    wait(sent_, i);
  }
  for (int after = 0; after < world_size_; ++after) {
    std::copy_n(blocks + after * bytes_, bytes_,
                running.outputs()[(rank_ + after) % world_size_].mutable_data_ptr<uint8_t>());
  }
}

void HostGroup::run_next(uint64_t number) {
  c10::intrusive_ptr<Running> next;
  wait_for_next();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    require_whole();
    sent_.clear();
    next = std::move(queue_.front());
    queue_.pop_front();
  }
  auto error = thrown_by([&] { make_rounds(*next, number); });
  if (error) {
    fail(error);
  }
  next->end(std::move(error));
}

void HostGroup::run() {
  const auto error = thrown_by([&] {
    ask(0);
    for (uint64_t number = 0;; ++number) {
      run_next(number);
      ask(number + 1);
    }
  });
  fail(error);
  const auto is_lost = [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !aborted_;
  };
  if (watch_.lost && is_lost()) {
    watch_.lost();
  }
  // Whoever waits for this rank learns of it by the connections' end.
  backend_.reset();
  const std::lock_guard<std::mutex> lock(mutex_);
  coming_ = {};
  sent_.clear();
  for (const auto& waiting : std::exchange(queue_, {})) {
    waiting->end(error_);
  }
}

}  // namespace brimful
