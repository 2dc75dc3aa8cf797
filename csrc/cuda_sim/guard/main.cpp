// guard --scratch FOLDER [--network] [--report FILE] -- PROGRAM ...: see README.md.
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "guard.h"

namespace guard {
namespace {

constexpr int kCannotGuard = 125;  // as env(1) and timeout(1) have it
constexpr const char* kUsage =
    "guard --scratch FOLDER [--network] [--in-memory] [--refuse] [--report FILE] -- PROGRAM ...";

volatile pid_t program = 0;

void say(const std::string& text) {
  std::fprintf(stderr, "guard: %s\n", text.c_str());
}

std::string absolute(const std::string& path) {
  std::array<char, 4096> whole{};
  return realpath(path.c_str(), whole.data()) == nullptr ? std::string() : whole.data();
}

Options read_arguments(int count, char** arguments) {
  Options options;
  int at = 1;
  const auto value = [&] {
    if (++at >= count) {
      give_up(std::string("an option lacks its value (option: ") + arguments[at - 1] + ")");
    }
    return std::string(arguments[at]);
  };
  for (; at < count && std::string_view(arguments[at]) != "--"; ++at) {
    const std::string_view name = arguments[at];
    if (name == "--scratch") {
      options.scratch = value();
    } else if (name == "--report") {
      options.report = value();
    } else if (name == "--network") {
      options.network = true;
    } else if (name == "--in-memory") {
      options.in_memory = true;
    } else if (name == "--refuse") {
      options.only_refuse = true;
    } else {
      give_up("an option is not known (option: " + std::string(name) + "); " + kUsage);
    }
  }
  for (++at; at < count; ++at) {
    options.command.emplace_back(arguments[at]);
  }
  if (options.command.empty() || options.scratch.empty()) {
    give_up(std::string("a program and a folder for what it writes are needed; ") + kUsage);
  }
  return options;
}

/// Nothing of an earlier run may be in it: the program would read that.
void make_scratch(Options& options) {
  const auto given = options.scratch;
  const auto cannot_be = [&](const char* what) {
    give_up_on(std::string("the scratch folder cannot be ") + what + " (folder: " + given + ")");
  };
  if (mkdir(given.c_str(), 0700) != 0 && errno != EEXIST) {
    cannot_be("made");
  }
  options.scratch = absolute(given);
  for (const char* name : {"/root", "/layers", "/tmp"}) {
    if (options.scratch.empty()) {
      cannot_be("found");
    } else if (mkdir((options.scratch + name).c_str(), 0700) == 0) {
      continue;
    } else if (errno != EEXIST) {
      cannot_be("written");
    }
    give_up("the scratch folder is not empty (folder: " + given + "); remove it, or name another");
  }
}

[[noreturn]] void run(const std::vector<std::string>& command) {
  std::vector<char*> words;
  for (const auto& word : command) {
    words.push_back(const_cast<char*>(word.c_str()));
  }
  words.push_back(nullptr);
  execvp(words[0], words.data());
  const int status = errno == ENOENT ? 127 : 126;
  say("the program cannot be started (program: " + command[0] + "): " + std::strerror(errno));
  _exit(status);
}

void pass_on(int signal) {
  if (program > 0) {
    kill(program, signal);
  }
}

int wait_for_program() {
  for (const int each : {SIGTERM, SIGHUP, SIGUSR1, SIGUSR2}) {
    std::signal(each, pass_on);
  }
  for (const int each : {SIGINT, SIGQUIT}) {  // a terminal sends them to the program too
    std::signal(each, SIG_IGN);
  }
  int status = 0;
  while (waitpid(program, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

void report_changes(const Options& options, const Redirection& redirection, int report) {
  const auto changes = changes_of(redirection);
  if (report >= 0) {
    if (write(report, changes.lines.data(), changes.lines.size()) != std::ssize(changes.lines)) {
      say("the report cannot be written whole (file: " + options.report + ")");
    }
  }
  if (changes.written + changes.removed > 0) {
    say("the machine's files are as they were (the program wrote: " +
        std::to_string(changes.written) + ", bytes: " + std::to_string(changes.bytes) +
        ", removed: " + std::to_string(changes.removed) + ")");
  }
  for (const auto& point : redirection.read_only) {
    if (access(point.c_str(), W_OK) == 0) {
      say("writes were refused in a file system that cannot be redirected (at: " + point + ")");
    }
  }
}

int guarded(int count, char** arguments) {
  auto options = read_arguments(count, arguments);
  make_scratch(options);
  const int report = options.report.empty() ? -1
                                            : open(options.report.c_str(),
                                                   O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
  if (report < 0 && !options.report.empty()) {
    give_up_on("the report cannot be written (file: " + options.report + ")");
  }
  Redirection redirection;
  std::string why = "--refuse";
  const bool redirected = !options.only_refuse && redirect(options, redirection, why);
  program = fork();
  if (program < 0) {
    give_up_on("the program cannot be started");
  }
  if (program == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (redirected) {
      enter(redirection);
    } else if (!refuse_writes(options)) {
      give_up("this system can neither redirect what a program writes (" + why +
              ") nor refuse it (Landlock, Linux 6.2), and the program was not run; run it in a "
              "container that "
              "may be thrown away");
    } else {
      say("what the program writes is refused outside of " + options.scratch + " (" + why + ")");
    }
    run(options.command);
  }
  const int status = wait_for_program();
  if (redirected) {
    report_changes(options, redirection, report);
  }
  return status;
}

}  // namespace

void give_up(const std::string& what) {
  say(what);
  _exit(kCannotGuard);
}

void give_up_on(const std::string& what) {
  give_up(what + ": " + std::strerror(errno));
}

}  // namespace guard

int main(int count, char** arguments) {
  return guard::guarded(count, arguments);
}
