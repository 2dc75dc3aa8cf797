#pragma once
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace brimful::test {

/// Sets torchrun's variables, and puts back what was there before.
class ScopedEnv {
 public:
  explicit ScopedEnv(const std::map<std::string, const char*>& values) {
    for (const auto& [name, value] : values) {
      const char* old = std::getenv(name.c_str());
      if (old != nullptr) {
        old_[name] = old;
      }
      names_.push_back(name);
      set(name, value);
    }
  }
  ~ScopedEnv() {
    for (const auto& name : names_) {
      set(name, old_.count(name) != 0 ? old_[name].c_str() : nullptr);
    }
  }
  ScopedEnv(const ScopedEnv&) = delete;
  ScopedEnv& operator=(const ScopedEnv&) = delete;

 private:
  static void set(const std::string& name, const char* value) {
    if (value == nullptr) {
      unsetenv(name.c_str());
    } else {
      setenv(name.c_str(), value, 1);
    }
  }
  std::vector<std::string> names_;
  std::map<std::string, std::string> old_;
};

inline std::string free_port() {
  const int fd = socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  socklen_t size = sizeof(address);
  auto* any = reinterpret_cast<sockaddr*>(&address);
  const bool found = bind(fd, any, size) == 0 && getsockname(fd, any, &size) == 0;
  close(fd);
  return found ? std::to_string(ntohs(address.sin6_port)) : "29731";
}

/// torchrun's variables for a world of one rank.
inline std::map<std::string, const char*> one_rank_world() {
  static const std::string port = free_port();
  return {{"RANK", "0"},
          {"WORLD_SIZE", "1"},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", port.c_str()},
          {"TORCHELASTIC_USE_AGENT_STORE", nullptr},
          {"TORCHELASTIC_RESTART_COUNT", nullptr},
          {"LOCAL_RANK", "0"}};
}

}  // namespace brimful::test
