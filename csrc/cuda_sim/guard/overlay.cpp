// Redirection by overlay file systems in namespaces that belong to this process: the kernel does it, for every way to write.
#include <dirent.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string_view>

#include "guard.h"

namespace guard {
namespace {

/// Shown to the program as they are: what they hold is no file of the user's.
constexpr std::string_view kDevices = "/dev";
constexpr std::string_view kProcesses = "/proc";
constexpr std::string_view kSystem = "/sys";  // and read-only
// Of folders that belong to others. A user's own are seldom deeper, and systems have many.
constexpr int kDeepest = 5;
constexpr int kMostFolders = 20'000;
constexpr std::string_view kShared = "/dev/shm";  // of the program's own processes

// As Linux 5.12 has them: headers of older systems lack them, and newer ones of the kernel and of glibc both have them.
constexpr long kMountSetattr = 442;
constexpr uint64_t kReadOnly = 1;
struct MountAttributes {
  uint64_t set = 0;
  uint64_t clear = 0;
  uint64_t propagation = 0;
  uint64_t user_namespace = 0;
};

bool is_below(std::string_view path, std::string_view folder) {
  return path == folder || folder == "/" ||
         (path.size() > folder.size() && path.substr(0, folder.size()) == folder &&
          path[folder.size()] == '/');
}

/// mountinfo writes a space as \040.
std::string unescaped(std::string_view text) {
  std::string path;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      path += static_cast<char>(((text[i + 1] - '0') << 6) | ((text[i + 2] - '0') << 3) |
                                (text[i + 3] - '0'));
      i += 3;
    } else {
      path += text[i];
    }
  }
  return path;
}

/// Parents first, each once.
std::vector<std::string> mount_points() {
  std::vector<std::string> points;
  std::ifstream table("/proc/self/mountinfo");
  for (std::string line; std::getline(table, line);) {
    size_t begin = 0;
    for (int field = 0; field < 4; ++field) {
      begin = line.find(' ', begin) + 1;
    }
    points.push_back(
        unescaped(std::string_view(line).substr(begin, line.find(' ', begin) - begin)));
  }
  std::sort(points.begin(), points.end());
  points.erase(std::unique(points.begin(), points.end()), points.end());
  return points;
}

/// In the options of an overlay a comma ends an option, and a colon a folder.
std::string as_option(const std::string& path) {
  std::string text;
  for (const char c : path) {
    if (c == ',' || c == ':' || c == '\\') {
      text += '\\';
    }
    text += c;
  }
  return text;
}

bool write_file(const char* path, const std::string& text) {
  const int file = open(path, O_WRONLY | O_CLOEXEC);
  const bool done = file >= 0 && write(file, text.data(), text.size()) == std::ssize(text);
  close(file);
  return done;
}

bool own_namespaces(const Options& options, bool& by_user) {
  const int wanted = CLONE_NEWNS | (options.network ? 0 : CLONE_NEWNET);
  if (unshare(wanted) == 0) {  // a privileged user's, who may copy files of every owner
    by_user = false;
    return true;
  }
  by_user = true;
  const auto user = std::to_string(geteuid());  // which no one owns afterwards
  const auto group = std::to_string(getegid());
  if (unshare(CLONE_NEWUSER | wanted) != 0) {
    return false;
  }
  write_file("/proc/self/setgroups", "deny");
  return write_file("/proc/self/uid_map", user + " " + user + " 1") &&
         write_file("/proc/self/gid_map", group + " " + group + " 1");
}

/// Processes of one program meet there, also where the machine's network is out of reach.
void raise_loopback() {
  const int any = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq request{};
  std::strcpy(request.ifr_name, "lo");
  request.ifr_flags = IFF_UP;
  if (any < 0 || ioctl(any, SIOCSIFFLAGS, &request) != 0) {
    give_up_on("the loopback device cannot be raised; pass --network to use the machine's");
  }
  close(any);
}

bool is_folder(const std::string& path) {
  struct stat found {};
  return stat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode);
}

/// Builds the root, mount by mount.
class View {
 public:
  View(const Options& options, bool by_user, Redirection& made)
      : scratch_(options.scratch),
        folder_(options.scratch + "/layers"),
        by_user_(by_user),
        mounts_(mount_points()),
        made_(made) {}

  /// Where layers can be: on the disk, or in memory. False: nowhere.
  bool find_room(bool in_memory) {
    if (!in_memory && has_room()) {
      return true;
    }
    // A layer of an overlay cannot be in another one, as a container's root is.
    return mount("tmpfs", folder_.c_str(), "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755") == 0 &&
           has_room();
  }

  void build() {
    if (mount("tmpfs", made_.root.c_str(), "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755") != 0) {
      give_up_on("the program's root cannot be made (folder: " + made_.root + ")");
    }
    show_entries("");
    if (!make_read_only(made_.root, 0)) {
      give_up_on("the program's root cannot be made read-only");
    }
  }

 private:
  bool has_mounts_below(const std::string& folder) const {
    return std::any_of(mounts_.begin(), mounts_.end(), [&](const std::string& point) {
      return point != folder && is_below(point, folder) && !is_below(point, scratch_);
    });
  }

  bool has_room() {
    const auto lower = folder_ + "/lower";
    const auto at = folder_ + "/at";
    mkdir(lower.c_str(), 0755);
    mkdir(at.c_str(), 0755);
    Redirection tried;
    if (!lay(lower, at, tried)) {
      return false;
    }
    umount2(at.c_str(), MNT_DETACH);
    return true;
  }

  /// Shows `point` at `at`, with a layer over it. False, and nothing is there, if the file system cannot have one.
  bool lay(const std::string& point, const std::string& at, Redirection& made) {
    const auto number = std::to_string(layers_++);
    const auto upper = folder_ + "/upper" + number;
    const auto work = folder_ + "/work" + number;
    mkdir(upper.c_str(), 0755);
    mkdir(work.c_str(), 0700);
    struct stat below {};
    if (stat(point.c_str(), &below) == 0) {
      chmod(upper.c_str(), below.st_mode & 07777);  // it is the root's mode
    }
    const auto options = "lowerdir=" + as_option(point) + ",upperdir=" + as_option(upper) +
                         ",workdir=" + as_option(work) + (by_user_ ? ",userxattr" : "");
    if (by_user_) {
      int most = kMostFolders;
      copy_folders(point, upper, kDeepest, most);
    }
    if (mount("overlay", at.c_str(), "overlay", 0, options.c_str()) != 0) {
      const int error = errno;
      rmdir(work.c_str());
      errno = error;
      return false;
    }
    made.layers.push_back({point, upper});
    return true;
  }

  /// A folder is copied into the layer when something in it changes, and the kernel refuses to copy one that belongs to a
  /// user or group whom the namespace lacks. Those are made at once.
  static void copy_folders(const std::string& from, const std::string& to, int depth, int& most) {
    DIR* const entries = opendir(from.c_str());
    while (const auto* entry = entries != nullptr ? readdir(entries) : nullptr) {
      const std::string name = entry->d_name;
      struct stat found {};
      if (name == "." || name == ".." || lstat((from + "/" + name).c_str(), &found) != 0 ||
          !S_ISDIR(found.st_mode) || (found.st_uid == geteuid() && found.st_gid == getegid()) ||
          --most < 0) {
        continue;
      }
      const auto copy = to + "/" + name;
      mkdir(copy.c_str(), 0700);
      chmod(copy.c_str(), found.st_mode & 07777);
      if (depth > 1) {
        copy_folders(from + "/" + name, copy, depth - 1, most);
      }
    }
    if (entries != nullptr) {
      closedir(entries);
    }
  }

  /// Folders that hold mounts: a layer over them would hide these, and the kernel refuses it.
  void show_entries(const std::string& folder) {
    DIR* const entries = opendir(folder.empty() ? "/" : folder.c_str());
    if (entries == nullptr) {
      show_as_it_is(folder, true);
      return;
    }
    while (const auto* entry = readdir(entries)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") {
        show(folder + "/" + name);
      }
    }
    closedir(entries);
  }

  void show(const std::string& path) {
    const auto at = made_.root + path;
    struct stat entry {};
    if (lstat(path.c_str(), &entry) != 0) {
      return;
    }
    if (S_ISLNK(entry.st_mode)) {
      std::array<char, 4096> target{};
      if (readlink(path.c_str(), target.data(), target.size() - 1) > 0) {
        symlink(target.data(), at.c_str());
      }
      return;
    }
    if (!S_ISDIR(entry.st_mode)) {
      close(open(at.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
      show_as_it_is(path, true);
      return;
    }
    mkdir(at.c_str(), 0700);
    chmod(at.c_str(), entry.st_mode & 07777);
    if (path == kSystem || path == kDevices || path == kProcesses) {
      show_as_it_is(path, path == kSystem);
    } else if (has_mounts_below(path)) {
      show_entries(path);
    } else if (!lay(path, at, made_)) {
      show_as_it_is(path, true);
    }
    if (path == kDevices) {
      share_memory();
    }
  }

  void show_as_it_is(const std::string& path, bool read_only) {
    const auto at = made_.root + path;
    if (mount(path.c_str(), at.c_str(), nullptr, MS_BIND | MS_REC, nullptr) != 0 ||
        (read_only && !make_read_only(at, AT_RECURSIVE))) {
      give_up_on("a path can be shown to the program neither redirected nor read-only (path: " +
                 path + "); pass --refuse");
    }
    if (read_only && path != kSystem && is_folder(path)) {
      made_.read_only.push_back(path);
    }
  }

  void share_memory() const {
    const auto shared = made_.root + std::string(kShared);
    if (access(shared.c_str(), F_OK) == 0 &&
        mount("tmpfs", shared.c_str(), "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777") != 0) {
      give_up_on("the program cannot have shared memory of its own (at: " + std::string(kShared) +
                 ")");
    }
  }

  static bool make_read_only(const std::string& point, int flags) {
    MountAttributes read_only;
    read_only.set = kReadOnly;
    return syscall(kMountSetattr, AT_FDCWD, point.c_str(), flags, &read_only, sizeof(read_only)) ==
           0;
  }

  std::string scratch_;
  std::string folder_;  ///< The layers'.
  bool by_user_;        ///< In a namespace of a user's, who may set fewer attributes.
  std::vector<std::string> mounts_;
  Redirection& made_;
  int layers_ = 0;
};

/// What is there belongs to the layers.
void hide(const std::string& folder) {
  if (access(folder.c_str(), F_OK) == 0 &&
      mount("tmpfs", folder.c_str(), "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m") != 0) {
    give_up_on("the scratch folder cannot be hidden (folder: " + folder + ")");
  }
}

/// It could undo what is mounted here, and make devices.
void drop_capabilities() {
  for (const int capability : {CAP_SYS_ADMIN, CAP_SYS_CHROOT, CAP_SYS_MODULE, CAP_SYS_RAWIO,
                               CAP_SYS_BOOT, CAP_SYS_TIME, CAP_MKNOD, CAP_NET_ADMIN}) {
    prctl(PR_CAPBSET_DROP, capability, 0, 0, 0);
  }
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
}

}  // namespace

bool redirect(const Options& options, Redirection& made, std::string& why) {
  const auto failed = [&](const std::string& what) {
    why = what + ": " + std::strerror(errno);
    return false;
  };
  bool by_user = false;
  if (!own_namespaces(options, by_user)) {
    return failed("namespaces of its own");
  }
  if (mount("", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
    return failed("private mounts");
  }
  made.root = options.scratch + "/root";
  View view(options, by_user, made);
  if (!view.find_room(options.in_memory)) {
    return failed("overlay file systems");
  }
  view.build();
  hide(made.root + options.scratch);
  if (!options.network) {
    raise_loopback();
  }
  return true;
}

void enter(const Redirection& redirection) {
  std::array<char, 4096> here{};
  const bool known = getcwd(here.data(), here.size()) != nullptr;
  if (access((redirection.root + "/tmp").c_str(), W_OK) != 0) {
    setenv("TMPDIR", std::string(kShared).c_str(), 1);
  }
  if (chroot(redirection.root.c_str()) != 0 || chdir(known ? here.data() : "/") != 0) {
    give_up_on("the program's view of the files cannot be entered");
  }
  drop_capabilities();
}

}  // namespace guard
