#include <brimful/error.h>
#include <brimful/step/control_record.h>
#include <brimful/step/stop.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>

#include <unistd.h>

namespace brimful {
namespace {
// As a record has it: 0, or 1 + the signal that asked.
std::atomic<uint8_t> request{0};
std::atomic<bool> regroup{false};
static_assert(std::atomic<uint8_t>::is_always_lock_free, "handlers of signals use it");

constexpr int kSignals = 63;  // numbers below it fit into a record
std::array<struct sigaction, kSignals> before;
pid_t owner = 0;

void on_signal(int signal) {
  sigaction(signal, &before.at(signal), nullptr);
  if (getpid() == owner) {
    request_stop(signal);
  } else {
    raise(signal);  // a child that was forked: when this returns it ends as ever
  }
}

bool try_handle(int signal) {
  struct sigaction was {};
  if (signal <= 0 || signal >= kSignals || sigaction(signal, nullptr, &was) != 0) {
    return false;
  }
  if (was.sa_handler == on_signal) {
    return true;
  }
  before.at(signal) = was;
  struct sigaction now {};
  now.sa_handler = on_signal;
  now.sa_flags = SA_RESTART;
  sigemptyset(&now.sa_mask);
  return sigaction(signal, &now, nullptr) == 0;
}

void adopt(uint8_t asked) noexcept {
  uint8_t known = request.load();
  while (known < asked && !request.compare_exchange_weak(known, asked)) {
  }
}
}  // namespace

void request_stop(int signal) noexcept {
  adopt(static_cast<uint8_t>(1 + (signal > 0 && signal < kSignals ? signal : 0)));
}

bool stop_requested() noexcept {
  return request != 0;
}

int stop_exit_code() noexcept {
  const int asked = request;
  return asked > 1 ? 128 + asked - 1 : 0;
}

void clear_stop() noexcept {
  request = 0;
}

uint8_t stop_to_send() noexcept {
  return request;
}

bool learn_stop(uint8_t stop) noexcept {
  adopt(stop);
  return stop != 0;
}

void request_regroup() noexcept {
  regroup = true;
}

bool regroup_requested() noexcept {
  return regroup;
}

void clear_regroup() noexcept {
  regroup = false;
}

bool regroups(const std::vector<ControlRecord>& records) {
  return std::any_of(records.begin(), records.end(),
                     [](const ControlRecord& record) { return record.regroup; });
}

bool stops(const std::vector<ControlRecord>& records) {
  uint8_t asked = 0;
  for (const auto& record : records) {
    asked = std::max(asked, record.stop);
  }
  return learn_stop(asked);
}

void stop_on(const std::vector<int>& signals) {
  owner = getpid();
  for (const int signal : signals) {
    TORCH_CHECK_VALUE(try_handle(signal), "the signal cannot be handled (signal: ", signal,
                      "); use one that the system lets programs handle, such as SIGTERM");
  }
}

}  // namespace brimful
