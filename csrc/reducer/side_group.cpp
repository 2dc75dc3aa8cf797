#include "reducer/side_group.h"

#include <ATen/ATen.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>

#include <utility>

#include "reducer/host_connector.h"
#include "reducer/host_watch.h"

namespace brimful {
namespace {
/// Of keys in the group's store; each participant has another.
std::string prefix_for(c10d::ProcessGroup& group, const std::string& name) {
  const auto store = group.getStore();
  const auto rank = std::to_string(group.getRank());
  const auto key = "brimful/" + name + "/";
  return key + (store ? std::to_string(store->add(key + rank, 1)) : std::string()) + "/";
}
}  // namespace

SideGroup::SideGroup(Group group, const std::string& name)
    : group_(std::move(group)),
      rank_(group_->getRank()),
      world_size_(group_->getSize()),
      prefix_(prefix_for(*group_, name)) {
  board_.emplace(group_->getStore(), prefix_);
}

void SideGroup::connect_hosts(int64_t bytes, std::function<void()> lost) {
  if (is_alone()) {
    return;
  }
  const auto store = group_->getStore();
  hosts_ = std::make_unique<HostGroup>(
      HostConnector(group_, store).connect(prefix_ + "hosts"), bytes, timeout(),
      watch_by(store, prefix_, rank_, world_size_, std::move(lost)));
}

std::chrono::milliseconds SideGroup::timeout() const {
  return group_->getBackend(c10::DeviceType::CPU)->getBackendOptions()->timeout;
}

template <typename Collective>
auto SideGroup::call(const std::string& could_not, const Collective& collective) const {
  try {
    TORCH_CHECK(group_, "the process groups have been released: the interpreter is ending");
    return collective();
  } catch (...) {
    detail::throw_rank_failed(
        -1, step_, Status::error,
        "the ranks could not " + could_not + " (rank " + std::to_string(rank_) +
            "); a rank left its loop, died or hangs: look at the others' output, and start the "
            "job again. The group said: " +
            to_string(std::current_exception()));
  }
}

std::vector<std::vector<uint8_t>> SideGroup::exchange(const std::vector<uint8_t>& own,
                                                      const std::string& what) const {
  const memory::Unlimited unlimited;
  return call("agree on " + what, [&] {
    if (!hosts_) {
      return exchange_bytes(group_, c10::Device(c10::DeviceType::CPU), own);
    }
    const auto exchange = hosts_->begin(own);
    exchange.work->wait();
    return exchange.read();
  });
}

std::vector<ControlRecord> SideGroup::exchange_record(const ControlRecord& own,
                                                      const std::string& what) const {
  const auto encoded = encode(own);
  std::vector<ControlRecord> records;
  for (const auto& bytes : exchange({encoded.begin(), encoded.end()}, what)) {
    records.push_back(decode_first(bytes));
  }
  return records;
}

std::vector<at::Tensor> SideGroup::gather(const at::Tensor& own) const {
  const memory::UnlimitedEverywhere unlimited;
  std::vector<std::vector<at::Tensor>> outputs(1);
  call("gather embeddings", [&] {
    std::vector<at::Tensor> inputs{own.cpu().contiguous()};
    for (int rank = 0; rank < world_size_; ++rank) {
      outputs[0].push_back(at::empty_like(inputs[0]));
    }
    return group_->allgather(outputs, inputs)->wait();
  });
  for (auto& output : outputs[0]) {
    output = output.to(own.device());
  }
  return std::move(outputs[0]);
}

void SideGroup::sum(at::Tensor& tensor) const {
  const memory::UnlimitedEverywhere unlimited;
  std::vector<at::Tensor> tensors(1);
  call("gather the gradients of embeddings", [&] {
    tensors[0] = tensor.cpu().contiguous();
    return group_->allreduce(tensors)->wait();
  });
  tensor.copy_(tensors[0]);
}

void SideGroup::abandon() const {
  if (hosts_) {
    hosts_->abort();
  }
  try {
    group_->abort();
  } catch (const std::exception& e) {
    log(LogLevel::warning, std::string("could not abort the side group: ") + e.what());
  }
}

}  // namespace brimful
