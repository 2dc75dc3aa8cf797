// Bytes between ranks: each pair has a socket each way.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>

#include "communicator.h"

namespace sim_nccl {
namespace {

constexpr int kLookForAbortMs = 20;

Part* first_of(std::vector<Part>& parts, int peer) {
  for (Part& part : parts) {
    if (part.peer == peer && part.left > 0) {
      return &part;
    }
  }
  return nullptr;
}

/// Whether the peer is there.
bool move_some(const pollfd& ready, Part& part) {
  const ssize_t moved = ready.events == POLLOUT
                            ? send(ready.fd, part.data, part.left, MSG_NOSIGNAL | MSG_DONTWAIT)
                            : recv(ready.fd, part.data, part.left, MSG_DONTWAIT);
  if (moved > 0) {
    part.data += moved;
    part.left -= static_cast<size_t>(moved);
    return true;
  }
  return moved < 0 && (errno == EAGAIN || errno == EINTR);
}

}  // namespace

void give_up(Links& links) {
  links.error = ncclRemoteError;
  while (!links.aborted) {
    std::this_thread::sleep_for(std::chrono::milliseconds(kLookForAbortMs));
  }
}

Turn::Turn(Links& links, long call) : links_(links) {
  for (long done = links.done; done < call && !links.aborted; done = links.done) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

Turn::~Turn() {
  ++links_.done;
}

Links::~Links() {
  for (const Wire& wire : wires) {
    close(wire.in);
    close(wire.out);
  }
}

void exchange(Links& links, std::vector<Part> sends, std::vector<Part> receives) {
  for (Part& part : receives) {
    if (part.room != nullptr) {
      part.room->resize(part.left);
      part.data = part.room->data();
    }
  }
  while (!links.aborted) {
    std::vector<pollfd> ready;
    std::vector<Part*> parts;
    const auto watch = [&](int fd, short event, Part* part) {
      if (part != nullptr) {
        ready.push_back({fd, event, 0});
        parts.push_back(part);
      }
    };
    for (size_t peer = 0; peer < links.wires.size(); ++peer) {
      watch(links.wires[peer].out, POLLOUT, first_of(sends, static_cast<int>(peer)));
      watch(links.wires[peer].in, POLLIN, first_of(receives, static_cast<int>(peer)));
    }
    if (ready.empty()) {
      return;
    }
    poll(ready.data(), ready.size(), kLookForAbortMs);
    for (size_t i = 0; i < ready.size(); ++i) {
      if (ready[i].revents != 0 && !move_some(ready[i], *parts[i])) {
        give_up(links);
        return;
      }
    }
  }
}

}  // namespace sim_nccl
