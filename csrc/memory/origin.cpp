#include <brimful/memory/origin.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <ctime>
#include <string_view>

#include "base/one_line.h"
#include "memory/system_bounds.h"

namespace brimful::memory {
namespace {

constexpr size_t kMostOfCommand = 1024;  // bytes

std::string command_now() {
  std::string command = read_or_empty("/proc/self/cmdline");
  for (char& byte : command) {
    byte = byte == '\0' ? ' ' : byte;
  }
  command.erase(command.find_last_not_of(' ') + 1);
  return one_line(first_bytes(command, kMostOfCommand));
}

std::string host_now() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? one_line(name.data()) : "";
}

std::string time_text(int64_t unix_ns) {
  const auto seconds = static_cast<std::time_t>(unix_ns / 1'000'000'000);
  std::tm parts{};
  std::array<char, 32> text{};
  if (gmtime_r(&seconds, &parts) == nullptr ||
      std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts) == 0) {
    return "";
  }
  return text.data();
}

}  // namespace

Origin origin_now() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return {host_now(), command_now(), getpid(),
          std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()};
}

std::string to_string(const Origin& origin) {
  std::string text = origin.command;
  if (origin.pid > 0) {
    text +=
        (text.empty() ? "pid " : " (pid ") + std::to_string(origin.pid) + (text.empty() ? "" : ")");
  }
  if (!origin.host.empty()) {
    text += (text.empty() ? "on host " : " on host ") + origin.host;
  }
  if (origin.unix_ns > 0) {
    text += (text.empty() ? "" : ", ") + time_text(origin.unix_ns);
  }
  return text;
}

}  // namespace brimful::memory
