#include "ladder/step_recorder.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "memory/cuda.h"

namespace brimful::ladder {
namespace {
uintptr_t address_of(const c10::Storage& storage) {
  return reinterpret_cast<uintptr_t>(storage.data());
}
}  // namespace

StepEventRecorder::StepEventRecorder(c10::Device device) : device_(device) {
  if (device.is_cuda()) {
    cuda_ = std::make_unique<memory::CudaTraceScope>(device);
    found_.brought_back = true;
  } else {
    cpu_ = std::make_unique<memory::TraceScope>();
  }
}

double StepEventRecorder::now_ms() const {
  if (cuda_) {  // once in the life of a model: its calls' times are the device's
    const c10::impl::VirtualGuardImpl guard(device_.type());
    guard.synchronizeStream(guard.getStream(device_));
  }
  const std::chrono::duration<double, std::milli> now =
      std::chrono::steady_clock::now().time_since_epoch();
  return now.count();
}

void StepEventRecorder::mark(Kind kind, int64_t what, uintptr_t address) {
  marks_.push_back({kind, seen(), what, address});
}

void StepEventRecorder::enter(int32_t module, const std::vector<at::Tensor>& arguments) {
  const auto now = now_ms();
  const std::lock_guard lock(mutex_);
  if (!open_ || in_backward_) {
    return;
  }
  StepEvents::Call call;
  call.module = module;
  call.piece = std::max(piece_, 0);
  call.parent = stack_.empty() ? kNever : stack_.back();
  call.forward_ms = aside_ms_ + left_out_ms_ - now;
  const auto place = std::ssize(found_.calls);
  stack_.push_back(place);
  found_.calls.push_back(std::move(call));
  mark(Kind::enter, place);
  for (const auto& argument : arguments) {
    if (argument.defined() && argument.has_storage()) {
      mark(Kind::argument, place, address_of(argument.storage()));
    }
  }
}

void StepEventRecorder::leave() {
  const auto now = now_ms();
  const std::lock_guard lock(mutex_);
  if (!open_ || in_backward_ || stack_.empty()) {
    return;
  }
  found_.calls[static_cast<size_t>(stack_.back())].forward_ms += now - aside_ms_ - left_out_ms_;
  mark(Kind::leave, stack_.back());
  stack_.pop_back();
}

void StepEventRecorder::leave_out(double ms) {
  const std::lock_guard lock(mutex_);
  left_out_ms_ += ms;
}

void StepEventRecorder::note_copied(int32_t module, int64_t bytes) {
  for (auto call = found_.calls.rbegin(); call != found_.calls.rend(); ++call) {
    if (call->module == module) {
      call->copied_bytes = bytes;
      return;
    }
  }
}

void StepEventRecorder::begin_forward() {
  const std::lock_guard lock(mutex_);
  in_backward_ = false;
  stack_.clear();
  ++piece_;
}

void StepEventRecorder::begin_backward() {
  const std::lock_guard lock(mutex_);
  in_backward_ = true;
}

int64_t StepEventRecorder::save(const c10::Storage& storage,
                                std::chrono::duration<double, std::milli> took) {
  const std::lock_guard lock(mutex_);
  if (!open_) {
    return kNever;
  }
  StepEvents::Save save;
  save.call = stack_.empty() ? kNever : stack_.back();
  const auto place = std::ssize(found_.saves);
  found_.saves.push_back(save);
  mark(Kind::save, place, address_of(storage));
  aside_ms_ += took.count();
  aside_bytes_ += took.count() > 0 ? static_cast<int64_t>(storage.nbytes()) : 0;
  return place;
}

void StepEventRecorder::use(int64_t save) {
  const std::lock_guard lock(mutex_);
  if (open_ && save != kNever) {
    mark(Kind::use, save);
  }
}

void StepEventRecorder::drop(int64_t save) {
  const std::lock_guard lock(mutex_);
  if (open_ && save != kNever) {
    mark(Kind::drop, save);
  }
}

/// Brings what the device and the marks say into one order.
class StepEventRecorder::Reader {
 public:
  explicit Reader(StepEvents& found) : found_(found) {}

  /// What is not of the step, but stays for the next ones.
  void leave_out(const std::vector<memory::CudaWorkspace>& workspaces) {
    for (const auto& each : workspaces) {
      const auto block = live_.find(reinterpret_cast<uintptr_t>(each.data));
      if (block != live_.end()) {
        found_.blocks[static_cast<size_t>(block->second)].bytes = 0;
      }
    }
  }

  void take(uintptr_t address, int64_t bytes) {
    live_[address] = std::ssize(found_.blocks);
    found_.blocks.push_back({bytes, found_.size++, kNever});
  }

  void give_back(uintptr_t address) {
    if (const auto block = live_.find(address); block != live_.end()) {
      found_.blocks[static_cast<size_t>(block->second)].given_back_at = found_.size++;
      live_.erase(block);
    }
  }

  void note(const Mark& mark) {
    const auto moment = found_.size++;
    const auto what = static_cast<size_t>(mark.what);
    switch (mark.kind) {
      case Kind::enter:
        found_.calls[what].entered_at = moment;
        break;
      case Kind::leave:
        found_.calls[what].left_at = moment;
        break;
      case Kind::argument:
        if (const auto block = block_at(mark.address); block != kNever) {
          found_.calls[what].arguments.push_back(block);
        }
        break;
      case Kind::save:
        found_.saves[what].saved_at = moment;
        found_.saves[what].block = block_at(mark.address);
        break;
      case Kind::use:
        found_.saves[what].used_at =
            found_.saves[what].used_at == kNever ? moment : found_.saves[what].used_at;
        break;
      case Kind::drop:
        found_.saves[what].dropped_at = moment;
        break;
    }
  }

 private:
  int64_t block_at(uintptr_t address) const {
    const auto block = live_.find(address);
    return block == live_.end() ? kNever : block->second;
  }

  StepEvents& found_;
  std::unordered_map<uintptr_t, int64_t> live_;
};

StepEvents StepEventRecorder::finish() {
  const std::lock_guard lock(mutex_);
  open_ = false;
  Reader reader(found_);
  auto mark = marks_.begin();
  const auto note_marks = [&](size_t behind) {
    for (; mark != marks_.end() && mark->behind <= behind; ++mark) {
      reader.note(*mark);
    }
  };
  if (cuda_) {
    const auto requests = cuda_->requests();
    for (size_t i = 0; i < requests.size(); ++i) {
      note_marks(i);
      if (requests[i].kind == memory::CachingRequest::Kind::take) {
        reader.take(requests[i].block, requests[i].bytes);
      } else if (requests[i].kind != memory::CachingRequest::Kind::give_back_pending) {
        reader.give_back(requests[i].block);
      }
    }
    note_marks(requests.size());
    reader.leave_out(memory::cuda_workspaces(device_));
  } else {
    const auto& trace = cpu_->trace();
    for (size_t i = 0; i < trace.size(); ++i) {
      note_marks(i);
      if (trace[i] > 0) {
        reader.take(cpu_->blocks()[i], trace[i]);
      } else {
        reader.give_back(cpu_->blocks()[i]);
      }
    }
    note_marks(trace.size());
  }
  // There and back.
  found_.offload_ms_per_byte =
      aside_bytes_ > 0 ? 2 * aside_ms_ / static_cast<double>(aside_bytes_) : 0;
  cpu_.reset();
  cuda_.reset();
  return std::move(found_);
}

void StepEventRecorder::stop() {
  const std::lock_guard lock(mutex_);
  open_ = false;
  cpu_.reset();
  cuda_.reset();
}

}  // namespace brimful::ladder
