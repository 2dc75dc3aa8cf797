// Between devices without arithmetic: a message says how many bytes there are, and has those that are known with it. Who
// takes them says so on the same socket, the other way.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <utility>

#include "communicator.h"

namespace sim_nccl {
namespace {

constexpr int kLookForAbortMs = 20;
constexpr uint64_t kOnTheWay = 200 << 10;  // about what a socket holds

struct Head {
  uint64_t bytes, known;
};

struct Sending {
  Part part;
  std::string text;
  size_t done = 0;

  bool is_out() const { return done == text.size(); }
};

struct Receiving {
  Part part;
  size_t bytes;  // in all
  std::string values;
};

/// What a socket gives at once: false if the peer is gone.
bool receive_some(int fd, std::string& text, size_t most) {
  char buffer[4096];
  const ssize_t got = recv(fd, buffer, std::min(most, sizeof buffer), MSG_DONTWAIT);
  if (got > 0) {
    text.append(buffer, static_cast<size_t>(got));
    return true;
  }
  return got < 0 && (errno == EAGAIN || errno == EINTR);
}

bool send_some(int fd, Sending& sending, Messages& messages) {
  const ssize_t put = send(fd, sending.text.data() + sending.done,
                           sending.text.size() - sending.done, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (put < 0) {
    return errno == EAGAIN || errno == EINTR;
  }
  sending.done += static_cast<size_t>(put);
  if (sending.is_out()) {
    messages.on_the_way += sending.part.left;
  }
  return true;
}

/// How many bytes the peer has taken.
bool take_receipts(int fd, Messages& messages) {
  uint64_t taken = 0;
  const ssize_t got = recv(fd, &taken, sizeof taken, MSG_DONTWAIT);
  if (got == sizeof taken) {
    messages.on_the_way -= std::min(taken, messages.on_the_way);
    return true;
  }
  return got < 0 && (errno == EAGAIN || errno == EINTR);
}

/// It is not waited for when the peer is gone, or does not listen now.
void send_receipt(int fd, Messages& messages) {
  if (messages.taken > 0 && send(fd, &messages.taken, sizeof messages.taken,
                                 MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof messages.taken) {
    messages.taken = 0;
  }
}

bool read_message(int fd, Messages& messages) {
  std::string& text = messages.arriving;
  Head head{0, 0};
  if (text.size() >= sizeof head) {
    std::memcpy(&head, text.data(), sizeof head);
  }
  const size_t whole = sizeof head + head.known;
  if (!receive_some(fd, text, whole - text.size())) {
    return false;
  }
  if (text.size() < sizeof head) {
    return true;
  }
  std::memcpy(&head, text.data(), sizeof head);
  if (text.size() == sizeof head + head.known) {
    messages.here = head.bytes;
    messages.values = text.substr(sizeof head);
    text.clear();
  }
  return true;
}

/// Values stay known if one message is all that is wanted, and no more.
void take(Messages& messages, Receiving& receiving) {
  const uint64_t bytes = std::min<uint64_t>(messages.here, receiving.part.left);
  const bool whole = bytes == receiving.bytes && bytes == messages.here;
  receiving.values = whole ? std::move(messages.values) : std::string();
  messages.values.clear();
  messages.here -= bytes;
  messages.taken += bytes;
  receiving.part.left -= bytes;
}

/// One exchange, of all peers together.
class Exchange {
 public:
  Exchange(Links& links, const std::vector<Part>& sends, const std::vector<Part>& receives)
      : links_(links) {
    sends_.resize(links.wires.size());
    receives_.resize(links.wires.size());
    for (const Part& part : sends) {
      if (part.left > 0) {
        const Head head{part.left, part.values.size()};
        std::string text(reinterpret_cast<const char*>(&head), sizeof head);
        sends_[part.peer].push_back({part, text + part.values});
      }
    }
    for (const Part& part : receives) {
      if (part.left > 0) {
        receives_[part.peer].push_back({part, part.left, {}});
      }
    }
  }

  /// Does what is possible now, and whether that was all: the sockets to wait for are in `waits`.
  bool go_on(std::vector<pollfd>& waits) {
    bool gone = false;
    for (size_t peer = 0; peer < links_.wires.size() && !gone; ++peer) {
      gone = !send_to(peer, waits) || !receive_from(peer, waits);
    }
    if (gone) {
      give_up(links_);
    }
    return gone || waits.empty();
  }

 private:
  bool send_to(size_t peer, std::vector<pollfd>& waits) {
    Wire& wire = links_.wires[peer];
    auto& queue = sends_[peer];
    if (queue.empty()) {
      return true;
    }
    if (!take_receipts(wire.out, wire.messages)) {
      return false;
    }
    while (!queue.empty()) {
      Sending& first = queue.front();
      if (!first.is_out() && !send_some(wire.out, first, wire.messages)) {
        return false;
      }
      if (!first.is_out()) {
        waits.push_back({wire.out, POLLOUT, 0});
        return true;
      }
      if (wire.messages.on_the_way > kOnTheWay) {
        waits.push_back({wire.out, POLLIN, 0});
        return true;
      }
      queue.pop_front();
    }
    return true;
  }

  bool receive_from(size_t peer, std::vector<pollfd>& waits) {
    Wire& wire = links_.wires[peer];
    auto& queue = receives_[peer];
    while (!queue.empty()) {
      Receiving& first = queue.front();
      if (wire.messages.here == 0) {
        const size_t had = wire.messages.arriving.size();
        if (!read_message(wire.in, wire.messages)) {
          return false;
        }
        if (wire.messages.here == 0 && wire.messages.arriving.size() == had) {
          waits.push_back({wire.in, POLLIN, 0});
          return true;
        }
        continue;
      }
      take(wire.messages, first);
      send_receipt(wire.in, wire.messages);
      if (first.part.left == 0) {
        finish(first);
        queue.pop_front();
      }
    }
    return true;
  }

  static void finish(Receiving& received) {
    if (received.part.room != nullptr) {
      *received.part.room = std::move(received.values);
    } else {
      write(received.part.data, received.values, received.bytes);
    }
  }

  Links& links_;
  std::vector<std::deque<Sending>> sends_;  // by peer, in their order
  std::vector<std::deque<Receiving>> receives_;
};

}  // namespace

void exchange_messages(Links& links, const std::vector<Part>& sends,
                       const std::vector<Part>& receives) {
  Exchange exchange(links, sends, receives);
  std::vector<pollfd> waits;
  while (!links.aborted && !exchange.go_on(waits)) {
    poll(waits.data(), waits.size(), kLookForAbortMs);
    waits.clear();
  }
}

}  // namespace sim_nccl
