#include <brimful/launch/checkpoint.h>

#include "base/replace_file.h"
#include "base/thrown_by.h"
#include "launch/meet.h"

namespace brimful::detail {

void write_on_rank0(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& path,
                    const std::function<void(const ByteSink&)>& write) {
  const auto error = thrown_by([&] {
    if (!group || group->getRank() == 0) {
      replace_file(path, Durable::yes, write);
    }
  });
  launch::meet(group, "save a checkpoint (path: " + path + ")", error);
}

void read_together(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& path,
                   const std::function<void()>& read) {
  launch::meet(group, "load a checkpoint (path: " + path + ")", thrown_by(read));
}

}  // namespace brimful::detail
