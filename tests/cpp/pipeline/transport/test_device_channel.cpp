// Messages between processes whose stages are on devices: shapes over gloo, payloads over what behaves as NCCL does.
#include "support/catch.h"

#include <ATen/ATen.h>
#include <brimful/error.h>
#include <brimful/launch/run_ranks.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <thread>

#include "pipeline/transport/peers.h"
#include "support/checks.h"
#include "support/fake_nccl.h"
#include "support/slow_device.h"
#include "support/watchdog.h"

namespace test_device_channel {

using namespace brimful;
using namespace brimful::pipeline;
using test::Checks;
using test::FakeNccl;
using test::Watchdog;
namespace slow = test::slow_device;

namespace {
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
constexpr int kMessages = 40;
constexpr int kFloats = 64;

std::atomic<int64_t> names{1};

/// Between ranks on one host, or as between two.
bool sockets = true;

std::shared_ptr<Peers> peers_with_fake(const Group& group, c10::Device device) {
  auto peers = std::make_shared<Peers>(
      group,
      [](const std::string& name, DeviceLane::End end) {
        return c10::make_intrusive<FakeNccl>(name, static_cast<int>(end));
      },
      sockets);
  peers->use(device);
  return peers;
}

/// Some computing takes longer than all else.
void dawdle(float message) {
  if (static_cast<int>(message) % 5 == 2) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

at::Tensor made_on(c10::Device device, float value, int64_t floats = kFloats) {
  const auto tensor = at::empty({floats}, at::TensorOptions(device));
  auto* const data = tensor.mutable_data_ptr<float>();
  slow::enqueue(device, [=] {
    dawdle(value);
    for (int64_t i = 0; i < floats; ++i) {
      std::atomic_ref(data[i]).store(value, std::memory_order_relaxed);
    }
  });
  return tensor;
}

/// Looks at the tensor when its device comes to it.
void look(const at::Tensor& tensor, float expected, std::atomic<int>& wrong) {
  auto* const data = const_cast<float*>(tensor.const_data_ptr<float>());
  slow::enqueue(tensor.device(), [=, &wrong, floats = tensor.numel()] {
    dawdle(expected);
    wrong += std::all_of(data, data + floats,
                         [&](float& x) {
                           return std::atomic_ref(x).load(std::memory_order_relaxed) == expected;
                         })
                 ? 0
                 : 1;
  });
}

Message message_of(at::Tensor tensor) {
  return {{{std::move(tensor)}, nullptr}, {0}};
}

/// What two ranks have of channels both ways.
struct Ends {
  /// `messages` of each channel in a step: so many are sent, or failures in their place.
  Ends(const Group& group, int64_t name, int channels, int messages)
      : rank(group->getRank()),
        messages(messages),
        device(slow::device(rank)),
        peers(peers_with_fake(group, device)) {
    const c10::DeviceGuard guard(device);
    peers->connect(name, {0, 1});
    for (int number = 0; number < channels; ++number) {
      out.push_back(peers->channel(rank, 1 - rank, 2 * number + rank));
      in.push_back(peers->channel(1 - rank, rank, 2 * number + 1 - rank));
    }
    begin();
  }
  void begin() {
    for (const auto* channels : {&out, &in}) {
      for (const auto& channel : *channels) {
        channel->reset(messages, 7);
      }
    }
  }
  void flush() {
    for (const auto& channel : out) {
      channel->flush();
    }
  }
  /// Its memory is let go of as soon as the host can, and written again at once.
  void send(int i, int channel = 0, int64_t floats = kFloats) {
    out[channel]->send(i, message_of(made_on(device, static_cast<float>(i), floats)));
    made_on(device, -1, floats);
  }

  int rank;
  int messages;
  c10::Device device;
  std::shared_ptr<Peers> peers;
  std::vector<std::unique_ptr<Channel>> out;
  std::vector<std::unique_ptr<Channel>> in;
};

template <typename Work>
void with_ends(const Work& work, int channels = 1, int messages = kMessages) {
  const auto name = ++names;
  run_ranks({2}, [&](int rank, const Group& group) {
    const c10::DeviceGuard guard(slow::device(rank));
    Ends ends(group, name, channels, messages);
    work(ends);
    ends.flush();
    ends.peers->agree({});  // no rank goes before the other has all
  });
}

int wrong_messages(const slow::Faults& faults = {}) {
  slow::install(faults);
  std::atomic<int> wrong{0};
  with_ends([&](Ends& ends) {
    for (int i = 0; i < kMessages; ++i) {  // both at once
      ends.send(i);
      const auto message = ends.in[0]->receive(i);
      wrong += message.value.tensors[0].device() == ends.device ? 0 : 1;
      look(message.value.tensors[0], static_cast<float>(i), wrong);
    }
  });
  slow::drain();
  slow::install();
  return wrong;
}
}  // namespace

TEST_CASE("Devices of two processes send to each other at once", "[pipeline][lanes]") {
  sockets = GENERATE(true, false);
  const Watchdog watchdog("devices of two processes", std::chrono::seconds(60));
  CHECK(wrong_messages() == 0);
}

TEST_CASE("Without any of its waits and records a lane goes wrong", "[pipeline][lanes]") {
  const Watchdog watchdog("lanes that go wrong", std::chrono::seconds(60));
  slow::Faults unknown;
  unknown.uses_unknown_to_memory = 0;
  CHECK(wrong_messages(unknown) > 0);
  slow::Faults no_event;
  no_event.waits_for_no_event = GENERATE(0, 1);
  CHECK(wrong_messages(no_event) > 0);
}

TEST_CASE("Messages of several channels are received in any order", "[pipeline][lanes]") {
  sockets = GENERATE(true, false);
  const Watchdog watchdog("channels in any order", std::chrono::seconds(60));
  slow::install();
  std::atomic<int> wrong{0};
  with_ends(
      [&](Ends& ends) {
        for (int i = 0; i < kMessages; ++i) {
          for (int channel = 0; channel < 3; ++channel) {
            ends.send(i, channel, 8 + 100 * ((i + channel) % 4));
          }
        }
        for (int channel = 0; channel < 3; ++channel) {
          for (int i = kMessages - 1; i >= 0; --i) {
            const auto tensor = ends.in[channel]->receive(i).value.tensors[0];
            wrong += tensor.numel() == 8 + 100 * ((i + channel) % 4) ? 0 : 1;
            look(tensor, static_cast<float>(i), wrong);
          }
        }
      },
      3);
  slow::drain();
  CHECK(wrong == 0);
}

TEST_CASE("A send waits for no receive, and a payload for no computing that it does not need",
          "[pipeline][lanes]") {
  const Watchdog watchdog("lanes that wait for nothing", std::chrono::seconds(60));
  slow::install();
  std::atomic<int> wrong{0};
  std::atomic<bool> released{false};
  std::atomic<bool> looked{false};
  with_ends(
      [&](Ends& ends) {
        if (ends.rank == 0) {
          ends.send(3);
          slow::enqueue(ends.device, [&] { released.wait(false); });  // what is computed later
          ends.send(4);
          return;
        }
        slow::enqueue(ends.device, [&] { released.wait(false); });
        {
          // Another stream of the receiver, which is free.
          const auto free =
              c10::impl::VirtualGuardImpl(ends.device.type()).getStreamFromGlobalPool(ends.device);
          const c10::StreamGuard guard(free);
          look(ends.in[0]->receive(3).value.tensors[0], 3, wrong);
          slow::enqueue(ends.device, [&] {
            looked = true;
            looked.notify_all();
          });
        }
        ends.in[0]->receive(4);
        looked.wait(false);  // the watchdog ends this, where the payload waits for either
        released = true;
        released.notify_all();
      },
      1, 5);
  slow::drain();
  CHECK(wrong == 0);
}

TEST_CASE("A message has what the CPU holds beside it, structure, and any shapes",
          "[pipeline][lanes]") {
  sockets = GENERATE(true, false);
  const Watchdog watchdog("mixed messages", std::chrono::seconds(60));
  slow::install();
  Checks checks;
  std::atomic<int> wrong{0};
  with_ends(
      [&](Ends& ends) {
        const auto small = at::arange(6, at::kLong).reshape({2, 3});
        const auto large = at::arange(2000, at::kLong);  // beyond what both ends know to come
        for (int step = 0; step < 2; ++step) {
          Message message = message_of(made_on(ends.device, 5));
          message.value.tensors.push_back(small);
          message.value.tensors.emplace_back();
          message.value.tensors.push_back(large);
          message.value.tensors.push_back(
              at::empty({0, 3}, at::TensorOptions(ends.device).dtype(at::kBool)));
          message.needs_gradient = {1, 0, 0, 0, 0};
          message.stashed = {"skip"};
          ends.out[0]->send(0, std::move(message));
          auto came = ends.in[0]->receive(0);
          const auto& tensors = came.value.tensors;
          checks.expect(tensors.size() == 5 && !tensors[2].defined(), "tensors");
          look(tensors[0], 5, wrong);
          checks.expect(at::equal(tensors[1], small) && at::equal(tensors[3], large), "of the CPU");
          checks.expect(tensors[4].device() == ends.device &&
                            tensors[4].scalar_type() == at::kBool &&
                            tensors[4].sizes() == at::IntArrayRef({0, 3}),
                        "empty");
          checks.expect(
              came.needs_gradient[0] == 1 && came.stashed == std::vector<std::string>{"skip"},
              "words");
          ends.flush();
          ends.begin();
        }
      },
      1, 1);
  slow::drain();
  CHECK(wrong == 0);
  CHECK(checks.failures().empty());
}

TEST_CASE("What a rank that failed has sent is received, and what it has not is known",
          "[pipeline][lanes]") {
  sockets = GENERATE(true, false);
  const Watchdog watchdog("failed ranks on devices", std::chrono::seconds(60));
  slow::install();
  Checks checks;
  std::atomic<int> wrong{0};
  const auto aborts = FakeNccl::aborts.load();
  with_ends(
      [&](Ends& ends) {
        for (int i = 0; i < 4; ++i) {
          if (ends.rank == 0 || i < 2) {
            ends.send(i);
          } else {
            ends.out[0]->send_failure(i);
          }
        }
        ends.out[0]->send_failure(1);  // was sent
        if (ends.rank == 0) {
          bool told = false;
          try {
            ends.in[0]->receive(2);
          } catch (const PeerFailed&) {
            told = true;
          }
          checks.expect(told, "a failure in place of a message");
        } else {
          slow::refuse_memory(1);
          CHECK_THROWS_AS(ends.in[0]->receive(3), c10::OutOfMemoryError);
          slow::refuse_memory(0);
        }
        for (int i = 0; i < 4; ++i) {
          ends.in[0]->discard(i);
        }
        ends.flush();
        ends.begin();
        for (int i = 0; i < 4; ++i) {
          ends.send(i);
          look(ends.in[0]->receive(i).value.tensors[0], static_cast<float>(i), wrong);
        }
        checks.expect(!ends.peers->agree({}).lost_link, "no lane is lost");
      },
      1, 4);
  slow::drain();
  CHECK(wrong == 0);
  CHECK(checks.failures().empty());
  CHECK(FakeNccl::aborts - aborts == 4);  // of the ends, when all was done
}

TEST_CASE("A payload without memory for it ends the lanes, and new ones work",
          "[pipeline][lanes]") {
  const Watchdog watchdog("lost lanes", std::chrono::seconds(60));
  slow::install();
  Checks checks;
  std::atomic<int> wrong{0};
  const auto again = ++names;
  with_ends(
      [&](Ends& ends) {
        if (ends.rank == 0) {
          ends.send(0);
        } else {
          slow::refuse_memory(100);
          CHECK_THROWS_AS(ends.in[0]->receive(0), c10::OutOfMemoryError);
          CHECK_THROWS_AS(ends.in[0]->discard(0), c10::OutOfMemoryError);
          slow::refuse_memory(0);
        }
        ends.flush();
        checks.expect(ends.peers->agree({}).lost_link && ends.peers->wants_links(),
                      "known to both");
        ends.peers->connect(again, {0, 1});
        ends.begin();
        ends.send(0);
        look(ends.in[0]->receive(0).value.tensors[0], 0, wrong);
      },
      1, 1);
  slow::drain();
  CHECK(wrong == 0);
  CHECK(checks.failures().empty());
}

TEST_CASE("Who waits for messages between devices has them", "[pipeline][lanes]") {
  const Watchdog watchdog("messages that are waited for", std::chrono::seconds(60));
  slow::install();
  Checks checks;
  std::atomic<bool> released{false};
  with_ends(
      [&](Ends& ends) {
        if (ends.rank == 0) {
          slow::enqueue(ends.device, [&] { released.wait(false); });
          return ends.send(0);
        }
        ends.in[0]->receive(0);
        const std::jthread later([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          released = true;
          released.notify_all();
        });
        ends.peers->await_messages();
        checks.expect(released, "the message");
      },
      1, 1);
  slow::drain();
  CHECK(checks.failures().empty());
}

TEST_CASE("Lanes whose communicator has failed are given up, and new ones work",
          "[pipeline][lanes]") {
  const Watchdog watchdog("lanes that are given up", std::chrono::seconds(60));
  slow::install();
  Checks checks;
  std::atomic<int> wrong{0};
  std::atomic<bool> released{false};
  const auto again = ++names;
  with_ends(
      [&](Ends& ends) {
        {
          const auto watched = ends.peers->look_after();
          if (ends.rank == 0) {
            slow::enqueue(ends.device, [&] { released.wait(false); });
            ends.send(0);
          } else {
            ends.in[0]->receive(0);
            FakeNccl::broken_end = 1;
            c10::Event end(ends.device.type());
            end.record(c10::impl::VirtualGuardImpl(ends.device.type()).getStream(ends.device));
            while (!end.query()) {  // it comes to its end, though nothing came
              std::this_thread::yield();
            }
            released = true;
            released.notify_all();
          }
          ends.flush();
          const auto verdict = ends.peers->agree({});
          checks.expect(verdict.kind == Status::error &&
                            verdict.text.find("the backend reports") != std::string::npos,
                        verdict.text);
          checks.expect(ends.peers->wants_links(), "lanes are gone");
        }
        FakeNccl::broken_end = -1;
        ends.peers->connect(again, {0, 1});
        ends.begin();
        ends.send(0);
        look(ends.in[0]->receive(0).value.tensors[0], 0, wrong);
      },
      1, 1);
  slow::drain();
  CHECK(wrong == 0);
  CHECK(checks.failures().empty());
}

TEST_CASE("A group that cannot serve the stages' device is refused", "[pipeline][lanes]") {
  const Watchdog watchdog("groups that are refused");
  run_ranks({1}, [&](int, const Group& group) {
    const auto bare = c10::make_intrusive<c10d::ProcessGroup>(group->getStore(), 0, 1);
    CHECK_THROWS_WITH(peers_of(bare), Catch::Contains("gloo"));
    CHECK_THROWS_AS(peers_of(bare), c10::ValueError);
    CHECK_THROWS_WITH(peers_of(group)->use(c10::Device("cuda:0")),
                      Catch::Contains("cpu:gloo,cuda:nccl"));
    CHECK_THROWS_AS(peers_of(group)->use(c10::Device("cuda:0")), c10::ValueError);
    CHECK_THROWS_WITH(peers_of(group)->use(c10::Device("meta")), Catch::Contains("meta"));
  });
}

}  // namespace test_device_channel
