#pragma once
// Not in brimful.h: torch/serialize.h costs a source file half a minute, unless it includes torch/torch.h anyway.
#include <brimful/export.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/serialize.h>

#include <cstddef>
#include <functional>
#include <string>

namespace c10d {
class ProcessGroup;  // defined in <torch/csrc/distributed/c10d/ProcessGroup.hpp>
}  // namespace c10d

namespace brimful {
namespace detail {
/// Takes all bytes; what went wrong is raised at the end, because torch's archives cannot be left in the middle.
using ByteSink = std::function<size_t(const void* bytes, size_t count)>;
BRIMFUL_API void write_on_rank0(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                const std::string& path,
                                const std::function<void(const ByteSink&)>& write);
BRIMFUL_API void read_together(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                               const std::string& path, const std::function<void()>& read);
}  // namespace detail

/// Saves what torch::save takes (a module, an optimizer, tensors), on rank 0 only, and returns on
/// every rank once the file is whole. It is written beside `path` (as path + ".partial"), brought to
/// the disk and renamed: at any time `path` holds the old file or the new one. To wrapped modules
/// pass model.module(). A null `group` is a group of one.
/// All ranks call it in the same order as other saves and loads of the group; they meet through the
/// group's store, without a collective, and wait for rank 0 at most the group's timeout. From one
/// thread per rank. Waits for the device that holds the value.
/// @throws on rank 0 what went wrong there: std::system_error where the file system refused, else
/// what torch::save threw; on the others RankFailed or RankOutOfMemory with rank 0's message. Then the
/// old file is as it was. RankFailed that names who is missing where ranks did not come in time;
/// then the file is whole, old or new. c10::ValueError if the group has no store
template <typename Value>
void save_on_rank0(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& path,
                   const Value& value) {
  detail::write_on_rank0(group, path,
                         [&](const detail::ByteSink& sink) { torch::save(value, sink); });
}

/// Loads on every rank what save_on_rank0 (or torch::save) wrote, with all tensors on `device`, this
/// rank's own. Returns once every rank has read the file: rank 0 may then write the next. As above
/// otherwise, and all hosts must see the file.
/// @throws on the ranks that failed what torch::load threw, on the others RankFailed or
/// RankOutOfMemory that names the lowest of them; as above otherwise
template <typename Value>
void load(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& path,
          Value& value, c10::Device device) {
  detail::read_together(group, path, [&] { torch::load(value, path, device); });
}

}  // namespace brimful
