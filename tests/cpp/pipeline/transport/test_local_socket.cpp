// Bytes between two processes of one host, here two threads.
#include "pipeline/transport/local_socket.h"

#include <c10/util/Exception.h>

#include <numeric>
#include <thread>

#include "support/catch.h"
#include "support/watchdog.h"

namespace test_local_socket {

using brimful::pipeline::LocalSocket;
using brimful::test::Watchdog;

namespace {
constexpr std::chrono::seconds kTimeout{10};

struct Ends {
  explicit Ends(std::chrono::milliseconds timeout = kTimeout) {
    LocalSocket::Door door;
    second = LocalSocket::connect(door.name(), timeout);
    first = door.accept(timeout);
  }
  std::shared_ptr<LocalSocket> first;
  std::shared_ptr<LocalSocket> second;
};
}  // namespace

TEST_CASE("Both ends of a socket may send more than it holds before either receives",
          "[pipeline][socket]") {
  const Watchdog watchdog("sockets both ways");
  Ends ends;
  constexpr int kMessages = 200;
  constexpr int kInts = 4096;  // 3 MB in all
  const auto run = [&](LocalSocket& socket, int own, int other) {
    std::vector<int> data(kInts);
    for (int i = 0; i < kMessages; ++i) {
      std::iota(data.begin(), data.end(), own + i);
      socket.send(data.data(), sizeof(int) * kInts);
    }
    bool right = true;
    for (int i = 0; i < kMessages; ++i) {
      std::vector<int> expected(kInts);
      std::iota(expected.begin(), expected.end(), other + i);
      const auto part = sizeof(int) * (i % 100);
      socket.receive(data.data(), part);
      socket.receive(reinterpret_cast<char*>(data.data()) + part, sizeof(int) * kInts - part);
      right &= data == expected;
    }
    socket.flush();
    return right;
  };
  bool second = false;
  std::thread thread([&] { second = run(*ends.second, 7, 1000); });
  const bool first = run(*ends.first, 1000, 7);
  thread.join();
  CHECK(first);
  CHECK(second);
}

TEST_CASE("A socket whose other end is gone, or silent, says so", "[pipeline][socket]") {
  const Watchdog watchdog("sockets that end");
  char byte = 1;
  SECTION("gone") {
    Ends ends;
    ends.second->send(&byte, 1);
    ends.second.reset();
    ends.first->receive(&byte, 1);
    CHECK_THROWS_WITH(ends.first->receive(&byte, 1), Catch::Contains("closed"));
    CHECK_THROWS_WITH(ends.first->send(&byte, 1), Catch::Contains("broke"));
  }
  SECTION("silent") {
    Ends ends(std::chrono::milliseconds(20));
    CHECK_THROWS_WITH(ends.first->receive(&byte, 1), Catch::Contains("in time"));
  }
  SECTION("not there") {
    CHECK(LocalSocket::connect("brimful-nobody", kTimeout) == nullptr);
  }
}

}  // namespace test_local_socket
