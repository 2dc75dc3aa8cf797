#include "pipeline/transport/local_socket.h"

#include <c10/util/Exception.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

namespace brimful::pipeline {
namespace {
constexpr size_t kReadBytes = 1 << 16;

int new_socket() {
  return ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
}

/// Of Linux's abstract namespace: no file, and gone with the last who has it open.
socklen_t put_name(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  const auto bytes = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), bytes);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
}

std::string random_socket_name() {
  std::random_device device;
  std::string name = "brimful-";
  for (int i = 0; i < 4; ++i) {
    name += std::to_string(device()) + "-";
  }
  return name;
}

bool is_readable(int fd, std::chrono::milliseconds timeout) {
  pollfd event{fd, POLLIN, 0};
  return ::poll(&event, 1, static_cast<int>(timeout.count())) == 1;
}

bool is_own_user(int fd) {
  ucred other{};
  socklen_t bytes = sizeof(other);
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &other, &bytes) == 0 && other.uid == ::geteuid();
}
}  // namespace

LocalSocket::Door::Door() : name_(random_socket_name()), fd_(new_socket()) {
  sockaddr_un address;
  const auto bytes = put_name(name_, address);
  if (fd_ >= 0 &&
      (::bind(fd_, reinterpret_cast<sockaddr*>(&address), bytes) != 0 || ::listen(fd_, 1) != 0)) {
    ::close(fd_);
    fd_ = -1;  // no other rank finds it
  }
}

LocalSocket::Door::~Door() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

std::shared_ptr<LocalSocket> LocalSocket::Door::accept(std::chrono::milliseconds timeout) {
  const int fd = is_readable(fd_, timeout) ? ::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC) : -1;
  if (fd >= 0 && !is_own_user(fd)) {
    ::close(fd);
    return nullptr;
  }
  return fd < 0 ? nullptr : std::make_shared<LocalSocket>(fd, timeout);
}

std::shared_ptr<LocalSocket> LocalSocket::connect(const std::string& name,
                                                  std::chrono::milliseconds timeout) {
  sockaddr_un address;
  const auto bytes = put_name(name, address);
  const int fd = new_socket();
  if (fd < 0) {
    return nullptr;
  }
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), bytes) != 0 || !is_own_user(fd)) {
    ::close(fd);
    return nullptr;
  }
  return std::make_shared<LocalSocket>(fd, timeout);
}

LocalSocket::LocalSocket(int fd, std::chrono::milliseconds timeout)
    : fd_(fd), timeout_(timeout), received_(kReadBytes) {
  timeval limit{};
  limit.tv_sec = timeout.count() / 1000;
  limit.tv_usec = (timeout.count() % 1000) * 1000;
  ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
}

LocalSocket::~LocalSocket() {
  ::close(fd_);
}

void LocalSocket::send(const void* data, size_t bytes) {
  const auto* const begin = static_cast<const uint8_t*>(data);
  kept_.insert(kept_.end(), begin, begin + bytes);
  push();
}

/// Whether nothing is kept any more.
bool LocalSocket::push() {
  size_t sent = 0;
  while (sent < kept_.size()) {
    const auto count =
        ::send(fd_, kept_.data() + sent, kept_.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      TORCH_CHECK(errno == EAGAIN, "the connection to another rank on this host broke (error: ",
                  std::strerror(errno), ")");
      break;
    }
    sent += static_cast<size_t>(count);
  }
  kept_.erase(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(sent));
  return kept_.empty();
}

void LocalSocket::await(bool readable) {
  const auto events = (readable ? POLLIN : 0) | (kept_.empty() ? 0 : POLLOUT);
  pollfd event{fd_, static_cast<int16_t>(events), 0};
  int ready = 0;
  do {
    ready = ::poll(&event, 1, static_cast<int>(timeout_.count()));
  } while (ready < 0 && errno == EINTR);
  TORCH_CHECK(ready > 0,
              "another rank on this host did not answer in time (timeout_ms: ", timeout_.count(),
              ")");
  if ((event.revents & POLLOUT) != 0) {
    push();
  }
}

void LocalSocket::fill() {
  while (true) {
    if (!kept_.empty()) {
      await(true);
    }
    const auto count =
        ::recv(fd_, received_.data(), received_.size(), kept_.empty() ? 0 : MSG_DONTWAIT);
    if (count > 0) {
      begin_ = 0;
      end_ = static_cast<size_t>(count);
      return;
    }
    TORCH_CHECK(count < 0, "another rank on this host has closed its connection");
    TORCH_CHECK(errno != EAGAIN || !kept_.empty(),
                "another rank on this host did not answer in time (timeout_ms: ", timeout_.count(),
                ")");
    TORCH_CHECK(errno == EAGAIN || errno == EINTR,
                "the connection to another rank on this host broke (error: ", std::strerror(errno),
                ")");
  }
}

void LocalSocket::receive(void* to, size_t bytes) {
  auto* at = static_cast<uint8_t*>(to);
  while (bytes > 0) {
    if (begin_ == end_) {
      fill();
    }
    const auto count = std::min(bytes, end_ - begin_);
    std::memcpy(at, received_.data() + begin_, count);
    begin_ += count;
    at += count;
    bytes -= count;
  }
}

void LocalSocket::flush() {
  while (!push()) {
    await(false);
  }
}

}  // namespace brimful::pipeline
