// Copies between devices on streams of their own, on a device that is as late as it can be.
#include "support/catch.h"

#include <ATen/ATen.h>
#include <brimful/pipeline/skip.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <thread>

#include "pipeline/executor/skips.h"
#include "pipeline/transport/local_channel.h"
#include "support/slow_device.h"
#include "support/watchdog.h"

namespace test_copy_lane {

using namespace brimful::pipeline;
using brimful::test::Watchdog;
namespace slow = brimful::test::slow_device;

namespace {
constexpr int kMessages = 60;
constexpr int kFloats = 64;

/// Some computing takes longer than all else.
void dawdle(float message) {
  if (static_cast<int>(message) % 5 == 2) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }
}

at::Tensor made_on(c10::Device device, float value) {
  if (device.is_cpu()) {
    return at::full({kFloats}, value);
  }
  const auto tensor = at::empty({kFloats}, at::TensorOptions(device));
  auto* const data = tensor.mutable_data_ptr<float>();
  slow::enqueue(device, [=] {
    dawdle(value);
    for (int i = 0; i < kFloats; ++i) {
      std::atomic_ref(data[i]).store(value, std::memory_order_relaxed);
    }
  });
  return tensor;
}

/// Looks at the tensor when its device comes to it.
void look(const at::Tensor& tensor, float expected, std::atomic<int>& wrong) {
  auto* const data = const_cast<float*>(tensor.const_data_ptr<float>());
  const auto compare = [=, &wrong] {
    const auto is_right = [&](float& x) {
      return std::atomic_ref(x).load(std::memory_order_relaxed) == expected;
    };
    wrong += std::all_of(data, data + kFloats, is_right) ? 0 : 1;
  };
  if (tensor.is_cpu()) {
    compare();
  } else {
    slow::enqueue(tensor.device(), [=] {
      dawdle(expected);
      compare();
    });
  }
}

/// Works on a stream of its own, as a rank does on the caller's.
template <typename Work>
std::thread rank_on(c10::Device device, const Work& work) {
  return std::thread([device, work] {
    if (device.is_cpu()) {
      return work();
    }
    const c10::DeviceGuard guard(device);
    work();
  });
}

void wait_for(const std::atomic<int>& count, int wanted) {
  for (int there = count; there < wanted; there = count) {
    count.wait(there);
  }
}

/// Messages that came with other values than they were sent with. Memory is let go of as soon as the host can, and
/// written again at once by what comes next on its stream.
int wrong_messages(c10::Device from, c10::Device to, const slow::Faults& faults = {}) {
  slow::install(faults);
  Bell bell;
  const std::atomic<bool> cancelled{false};
  std::atomic<int> wrong{0};
  std::atomic<int> received{0};
  LocalChannel channel(bell, cancelled, CopyLane::between(from, to));
  channel.reset(kMessages, 0);
  auto sender = rank_on(from, [&] {
    for (int i = 0; i < kMessages; ++i) {
      wait_for(received, i - 1);  // so that it may take what was let go of
      channel.send(i, {{{made_on(from, static_cast<float>(i))}, nullptr}, {0}});
      made_on(from, -1);
    }
  });
  auto receiver = rank_on(to, [&] {
    for (int i = 0; i < kMessages; ++i) {
      const auto message = channel.receive(i);
      wrong += message.value.tensors[0].device() == to ? 0 : 1;
      look(message.value.tensors[0], static_cast<float>(i), wrong);
      ++received;
      received.notify_all();
    }
  });
  sender.join();
  receiver.join();
  slow::drain();
  slow::install();
  return wrong;
}
}  // namespace

TEST_CASE("Copies between devices are right however late streams are", "[pipeline][streams]") {
  const Watchdog watchdog("copies between devices", std::chrono::seconds(60));
  const c10::Device cpu(c10::DeviceType::CPU);
  CHECK(wrong_messages(slow::device(0), slow::device(1)) == 0);
  CHECK(wrong_messages(slow::device(1), slow::device(0)) == 0);
  CHECK(wrong_messages(cpu, slow::device(0)) == 0);
  CHECK(wrong_messages(slow::device(0), cpu) == 0);
}

TEST_CASE("What is left for others to fetch is right however late streams are",
          "[pipeline][streams]") {
  const Watchdog watchdog("fetched from another device", std::chrono::seconds(60));
  slow::install();
  SkipBoard board;
  std::atomic<int> wrong{0};
  const auto cpu = c10::Device(c10::DeviceType::CPU);
  for (const auto& [from, to] :
       {std::pair(slow::device(0), slow::device(1)), std::pair(slow::device(1), cpu),
        std::pair(cpu, slow::device(0))}) {
    std::atomic<int> left{0};
    auto giver = rank_on(from, [&, from = from] {
      for (int i = 0; i < kMessages; ++i) {
        SkipRecord record;
        const SkipScope scope(board, record, i, from);
        stash("there", made_on(from, static_cast<float>(i)));
        board.put_gradient("back", i, made_on(from, static_cast<float>(-i)));
        made_on(from, -1);
        ++left;
        left.notify_all();
      }
    });
    auto taker = rank_on(to, [&, to = to] {
      for (int i = 0; i < kMessages; ++i) {
        wait_for(left, i + 1);
        SkipRecord record;
        const SkipScope scope(board, record, i, to);
        const auto tensor = pop("there");
        wrong += tensor.device() == to ? 0 : 1;
        look(tensor, static_cast<float>(i), wrong);
        look(board.take_gradient("back", i, to), static_cast<float>(-i), wrong);
      }
    });
    giver.join();
    taker.join();
    slow::drain();
  }
  CHECK(wrong == 0);
}

TEST_CASE("Without any of its waits and records a copy goes wrong", "[pipeline][streams]") {
  const Watchdog watchdog("copies that go wrong", std::chrono::seconds(60));
  const int device = GENERATE(0, 1);  // of the source, and of the target
  CAPTURE(device);
  slow::Faults unknown;
  unknown.uses_unknown_to_memory = device;
  CHECK(wrong_messages(slow::device(0), slow::device(1), unknown) > 0);
  slow::Faults no_event;
  no_event.waits_for_no_event = device;
  CHECK(wrong_messages(slow::device(0), slow::device(1), no_event) > 0);
}

TEST_CASE("A copy does not wait for what its source computes later", "[pipeline][streams]") {
  const Watchdog watchdog("copies that wait for what they copy alone", std::chrono::seconds(60));
  slow::install();
  const auto from = slow::device(0);
  const auto to = slow::device(1);
  const auto lane = CopyLane::between(from, to);
  std::atomic<bool> released{false};
  Message message{{{made_on(from, 7)}, nullptr}, {0}};
  slow::enqueue(to, [&] { released.wait(false); });  // the receiver computes, and so does
  lane->depart(message);
  slow::enqueue(from, [&] { released.wait(false); });  // the sender, behind what it has sent
  std::atomic<int> wrong{0};
  std::atomic<bool> looked{false};
  {
    // Another stream of the receiver's device, which is free.
    const auto free = c10::impl::VirtualGuardImpl(to.type()).getStreamFromGlobalPool(to);
    const c10::StreamGuard guard(free);
    lane->arrive(message);
    look(message.value.tensors[0], 7, wrong);
    slow::enqueue(to, [&] {
      looked = true;
      looked.notify_all();
    });
  }
  looked.wait(false);  // the watchdog ends this, where the copy waits for either
  released = true;
  released.notify_all();
  slow::drain();
  CHECK(wrong == 0);
}

TEST_CASE("There is no lane within a device, or between two names of the CPU",
          "[pipeline][streams]") {
  const auto cpu = c10::Device("cpu");
  CHECK_FALSE(CopyLane::between(cpu, cpu));
  CHECK_FALSE(CopyLane::between(cpu, c10::Device("cpu:0")));
  CHECK_FALSE(CopyLane::between(slow::device(1), slow::device(1)));
}

}  // namespace test_copy_lane
