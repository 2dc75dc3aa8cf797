#include <brimful/launch/checkpoint.h>

#include <exception>

#include "base/replace_file.h"
#include "launch/meet.h"

namespace brimful::detail {
namespace {

std::exception_ptr error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace

void write_on_rank0(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& path,
                    const std::function<void(const ByteSink&)>& write) {
  const auto error = error_of([&] {
    if (!group || group->getRank() == 0) {
      replace_file(path, Durable::yes, write);
    }
  });
  launch::meet(group, "save a checkpoint (path: " + path + ")", error);
}

void read_together(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& path,
                   const std::function<void()>& read) {
  launch::meet(group, "load a checkpoint (path: " + path + ")", error_of(read));
}

}  // namespace brimful::detail
