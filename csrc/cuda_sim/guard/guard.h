// A program that may change nothing: what each part of the guard does.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace guard {

struct Options {
  std::string scratch;       ///< Folder for what the program writes, an absolute path.
  std::string report;        ///< File that gets a line for each change; empty: none.
  bool network = false;      ///< The program may use the machine's network.
  bool in_memory = false;    ///< What it writes is held in memory, and not in `scratch`.
  bool only_refuse = false;  ///< Writes are refused, also if they could be redirected.
  std::vector<std::string> command;
};

/// Ends the guard with status 125 and a sentence.
[[noreturn]] void give_up(const std::string& what);
/// As give_up(), with the text of `errno`.
[[noreturn]] void give_up_on(const std::string& what);

// --- overlay.cpp: redirection ---------------------------------------------------------------------
/// A file system whose changes are redirected.
struct Layer {
  std::string point;  ///< The path that the program knows.
  std::string upper;  ///< Where its changes are.
};
struct Redirection {
  std::string root;  ///< The folder that is "/" for the program.
  std::vector<Layer> layers;
  std::vector<std::string>
      read_only;  ///< Mount points that cannot be redirected: writes there are refused.
};
/// Moves this process to namespaces of its own, where `root` shows the machine's files, and its changes go to the layers.
/// Returns false, with the reason in `why`, where the system does not allow that; then nothing has changed, unless that the
/// process may have namespaces of its own.
bool redirect(const Options& options, Redirection& made, std::string& why);
/// In the child: "/" is the root from here on, and this process can mount nothing any more.
void enter(const Redirection& redirection);

// --- landlock.cpp: refusal ------------------------------------------------------------------------
/// Writes outside of `scratch` fail from here on with EACCES, in this process and those that it starts. Returns false where
/// the kernel has no Landlock.
bool refuse_writes(const Options& options);

// --- changes.cpp ----------------------------------------------------------------------------------
struct Changes {
  int64_t written = 0;  ///< Files.
  int64_t bytes = 0;    ///< Of these.
  int64_t removed = 0;  ///< Files and folders.
  std::string lines;    ///< "written BYTES PATH" or "removed PATH", by path.
};
Changes changes_of(const Redirection& redirection);

}  // namespace guard
