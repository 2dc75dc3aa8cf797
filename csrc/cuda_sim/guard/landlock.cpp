// Refusal by Landlock, where the system does not allow namespaces.
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

#include "guard.h"

namespace guard {
namespace {

// As Linux 5.13 has them; 5.19 added moves between folders, 6.2 truncation, 6.7 the network. Older systems' headers lack them.
constexpr long kCreateRuleset = 444;
constexpr long kAddRule = 445;
constexpr long kRestrictSelf = 446;
constexpr uint32_t kAskVersion = 1;
constexpr int kPathBeneath = 1;
constexpr uint64_t kWriteFile = uint64_t{1} << 1;
constexpr uint64_t kTruncate = uint64_t{1} << 14;
/// Written, removed (4 and 5), made (6 to 12), moved (13), cut.
constexpr uint64_t kChanges = kWriteFile | (uint64_t{0x3ff} << 4) | kTruncate;
constexpr uint64_t kConnect = uint64_t{1} << 1;

struct Rules {
  uint64_t files = 0;
  uint64_t network = 0;
};

struct __attribute__((packed)) Beneath {
  uint64_t allowed = 0;
  int32_t folder = -1;
};

void allow(int rules, const std::string& folder, uint64_t what) {
  const Beneath rule{what, open(folder.c_str(), O_PATH | O_CLOEXEC)};
  if (rule.folder < 0) {
    return;
  }
  if (syscall(kAddRule, rules, kPathBeneath, &rule, 0) != 0) {
    give_up_on("a folder cannot be opened to the program (folder: " + folder + ")");
  }
  close(rule.folder);
}

}  // namespace

bool refuse_writes(const Options& options) {
  const auto version = syscall(kCreateRuleset, nullptr, 0, kAskVersion);
  if (version < 3) {  // a program could still cut a file to nothing
    return false;
  }
  if (version < 4 && !options.network) {
    give_up(
        "the network cannot be kept out of reach here (that takes Linux 6.7), and the program was "
        "not run; pass --network to let it through");
  }
  Rules wanted{kChanges, 0};
  if (version >= 4 && !options.network) {
    wanted.network = kConnect;
  }
  const auto size = version >= 4 ? sizeof(wanted) : sizeof(wanted.files);
  const auto rules = static_cast<int>(syscall(kCreateRuleset, &wanted, size, 0));
  if (rules < 0) {
    return false;
  }
  allow(rules, options.scratch, wanted.files);
  allow(rules, "/dev/shm", wanted.files);
  allow(rules, "/dev", kWriteFile | kTruncate);
  allow(rules, "/proc", kWriteFile | kTruncate);
  const auto temporary = options.scratch + "/tmp";
  setenv("TMPDIR", temporary.c_str(), 1);
  const bool done =
      prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && syscall(kRestrictSelf, rules, 0) == 0;
  close(rules);
  return done;
}

}  // namespace guard
