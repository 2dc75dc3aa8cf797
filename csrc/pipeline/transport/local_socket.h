#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace brimful::pipeline {

/// Bytes between two processes of one host, both ways and in order, without a thread between them: who waits for bytes is
/// woken by who sends them. For one thread at a time.
class LocalSocket {
 public:
  /// A place where one other process, of the same user, may connect.
  class Door {
   public:
    Door();
    ~Door();
    Door(const Door&) = delete;
    Door& operator=(const Door&) = delete;
    const std::string& name() const { return name_; }
    /// Once the other process has connected; none where it is not of this user.
    std::shared_ptr<LocalSocket> accept(std::chrono::milliseconds timeout);

   private:
    std::string name_;
    int fd_;
  };

  /// None where there is no such door: on another host, or in another namespace.
  static std::shared_ptr<LocalSocket> connect(const std::string& name,
                                              std::chrono::milliseconds timeout);
  LocalSocket(int fd, std::chrono::milliseconds timeout);
  ~LocalSocket();
  LocalSocket(const LocalSocket&) = delete;
  LocalSocket& operator=(const LocalSocket&) = delete;

  /// Does not wait: what finds no room is kept, and goes in later calls.
  /// @throws c10::Error if the other process is gone, as all below
  void send(const void* data, size_t bytes);
  /// Waits for so many.
  void receive(void* to, size_t bytes);
  /// Waits until the other process's host has all.
  void flush();

 private:
  void fill();
  bool push();
  void await(bool readable);

  int fd_;
  std::chrono::milliseconds timeout_;
  std::vector<uint8_t> kept_;      ///< to be sent
  std::vector<uint8_t> received_;  ///< of which those from `begin_` to `end_` are still to be taken
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace brimful::pipeline
