// Torch's NCCL groups make a stream wait and not the host: a host that then waits for the stream does not learn that a rank
// has died.
#include "reducer/device_wait.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <typeindex>
#include <typeinfo>
#include <unordered_map>

namespace brimful {
namespace {
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kListenToDevice{500};
constexpr milliseconds kLongestMargin{10000};
constexpr int kMarginPart = 8;  // of a timeout

/// A question that backends of some kinds answer by throwing: they are asked once, since a wait asks all the time.
template <typename Answer>
class Question {
 public:
  explicit Question(Answer (c10d::Backend::*ask)()) : ask_(ask) {}

  std::optional<Answer> operator()(c10d::Backend& backend) {
    const std::type_index kind = typeid(backend);
    if (!answers(kind)) {
      return std::nullopt;
    }
    try {
      auto answer = (backend.*ask_)();
      note(kind, true);
      return answer;
    } catch (const std::exception&) {
      note(kind, false);
      return std::nullopt;
    }
  }

 private:
  bool answers(std::type_index kind) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = answers_.find(kind);
    return known == answers_.end() || known->second;
  }
  /// The first time counts: what has answered is asked again, whatever it throws.
  void note(std::type_index kind, bool answered) {
    const std::lock_guard<std::mutex> lock(mutex_);
    answers_.emplace(kind, answered);
  }

  Answer (c10d::Backend::*ask_)();
  std::mutex mutex_;  // not held while a backend is asked: Python's takes the GIL
  std::unordered_map<std::type_index, bool> answers_;
};

/// A short wait is a step's, where a late look costs time; a long one shall leave the processor to others.
void pause(Clock::duration waited) {
  if (waited < milliseconds(5)) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(waited < milliseconds(100) ? std::chrono::microseconds(50)
                                                           : milliseconds(1));
  }
}
}  // namespace

/// When to give up: torch's watchdog looks up to a second apart, and would end the process at the timeout.
std::optional<milliseconds> patience_of(c10d::Backend& backend) {
  static Question options_of(&c10d::Backend::getBackendOptions);
  const auto options = options_of(backend);
  if (!options) {
    return std::nullopt;
  }
  const auto timeout = (*options)->timeout;
  return timeout - std::min(kLongestMargin, timeout / kMarginPart);
}

void require_no_error(c10d::Backend& backend) {
  static Question error_of(&c10d::Backend::getError);
  const auto error = error_of(backend).value_or(c10d::ErrorType::SUCCESS);
  if (error != c10d::ErrorType::SUCCESS) {
    throw std::runtime_error(error == c10d::ErrorType::TIMEOUT
                                 ? "the backend reports that a collective timed out"
                                 : "the backend reports an error of its communicator");
  }
}

bool waits_in_streams(c10d::ProcessGroup& group, c10::Device device) {
  return device.is_cuda() &&
         group.getBackend(device.type())->getBackendName().rfind("nccl", 0) == 0;
}

void require_no_error(const Group& group, c10::Device device) {
  if (!device.is_cpu() && group->getSize() > 1) {
    require_no_error(*group->getBackend(device.type()));
  }
}

void wait_on_device(const Group& group, c10::Device device, c10d::Work& work,
                    std::chrono::steady_clock::time_point since,
                    const std::function<void()>& listen) {
  const auto backend = group->getBackend(device.type());
  const auto patience = patience_of(*backend);
  const auto begin = Clock::now();
  auto listen_at = begin + kListenToDevice;
  while (!work.isCompleted()) {
    require_no_error(*backend);
    const auto now = Clock::now();
    if (patience && now - since > *patience) {
      throw std::runtime_error("the other ranks did not reach the collective in " +
                               std::to_string(patience->count()) + " ms");
    }
    if (now > listen_at) {
      listen();
      listen_at = now + kListenToDevice;
    }
    pause(now - begin);
  }
  if (const auto error = work.exception()) {
    std::rethrow_exception(error);
  }
  require_no_error(*backend);
  work.wait();
}

}  // namespace brimful
