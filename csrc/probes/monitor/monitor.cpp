#include <brimful/log.h>
#include <brimful/probes/monitor.h>
#include <c10/util/Exception.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/replace_file.h"
#include "base/whole_file.h"

namespace brimful::probes {
namespace {

/// A place that samples go to, until it fails.
class Sink {
 public:
  Sink(const char* name, std::function<void(const Sample&, int64_t)> put)
      : name_(name), put_(std::move(put)) {}

  void put(const Sample& sample, int64_t step) {
    if (!put_) {
      return;
    }
    std::string problem = "an exception that is no std::exception";
    try {
      put_(sample, step);
      return;
    } catch (const c10::Error& error) {
      problem = error.what_without_backtrace();
    } catch (const std::exception& error) {
      problem = error.what();
    } catch (...) {
    }
    put_ = nullptr;
    log(LogLevel::warning, std::string("the monitor writes no more ") + name_ + ": " + problem);
  }

 private:
  const char* name_;
  std::function<void(const Sample&, int64_t)> put_;
};

void add_scalars(const AddScalar& add_scalar, const Sample& sample, int64_t step) {
  for (const auto& metric : metrics_of(sample)) {
    const auto label = metric.labels.empty() ? "" : metric.labels.front().second + "/";
    add_scalar(metric.group + "/" + label + metric.quantity, metric.value, step);
  }
}

std::optional<Sample> try_sample() noexcept {
  try {
    return take_sample();
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("the monitor ends: ") + error.what());
  }
  return std::nullopt;
}

std::vector<Sink> sinks_of(const MonitorOptions& options) {
  std::vector<Sink> sinks;
  if (!options.json_path.empty()) {
    sinks.emplace_back("JSON lines", [path = options.json_path](const auto& sample, int64_t) {
      append_to_file(path, to_json(sample) + "\n");
    });
  }
  if (!options.prometheus_path.empty()) {
    sinks.emplace_back("Prometheus text",
                       [path = options.prometheus_path](const auto& sample, int64_t) {
                         write_file(path, to_prometheus(sample));
                       });
  }
  if (options.add_scalar) {
    sinks.emplace_back("scalars", [add = options.add_scalar](const auto& sample, int64_t step) {
      add_scalars(add, sample, step);
    });
  }
  return sinks;
}

}  // namespace

struct Monitor::Impl {
  explicit Impl(const MonitorOptions& options)
      : interval(options.interval_ms), sinks(sinks_of(options)) {
    thread = std::thread([this] { run(); });
  }

  void run() {
    auto next = std::chrono::steady_clock::now();
    for (bool last = false; !last;) {
      {
        std::unique_lock lock(mutex);
        last = wake.wait_until(lock, next, [&] { return stopping; });
      }
      const auto sample = try_sample();
      if (!sample) {
        return;
      }
      for (auto& sink : sinks) {
        sink.put(*sample, taken);
      }
      ++taken;
      next = std::max(next + interval, std::chrono::steady_clock::now());
    }
  }

  std::chrono::milliseconds interval;
  std::vector<Sink> sinks;
  std::atomic<int64_t> taken{0};
  std::mutex stop_mutex;
  std::mutex mutex;
  std::condition_variable wake;
  bool stopping = false;
  pid_t owner = getpid();
  std::thread thread;
};

Monitor::Monitor(const MonitorOptions& options) {
  TORCH_CHECK_VALUE(options.interval_ms > 0,
                    "the interval must be positive (interval_ms: ", options.interval_ms, ")");
  impl_ = std::make_unique<Impl>(options);
}

Monitor::~Monitor() {
  stop();
  if (impl_->owner != getpid()) {
    // Its thread and whatever it had locked are the parent's.
    [[maybe_unused]] const auto* const left = impl_.release();
  }
}

void Monitor::stop() {
  if (impl_->owner != getpid()) {
    return;
  }
  const std::lock_guard one_at_a_time(impl_->stop_mutex);
  if (!impl_->thread.joinable()) {
    return;
  }
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->wake.notify_all();
  impl_->thread.join();
}

int64_t Monitor::samples() const {
  return impl_->taken;
}

}  // namespace brimful::probes
