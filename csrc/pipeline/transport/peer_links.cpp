// What ranks have between each other beside their group.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "pipeline/transport/nccl_pair.h"
#include "pipeline/transport/peers.h"

namespace brimful::pipeline {
namespace {
constexpr int64_t kDoorBytes = 108;

std::chrono::milliseconds timeout_of(c10d::Backend& gloo) {
  try {
    return gloo.getBackendOptions()->timeout;
  } catch (const c10::Error&) {  // has none
    return kBackendDefaultTimeout;
  }
}

bool serves(const c10d::ProcessGroup& group, c10::DeviceType type) {
  const auto devices = group.getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(),
                     [type](c10::Device device) { return device.type() == type; });
}

}  // namespace

void Peers::use(c10::Device device) {
  TORCH_CHECK_VALUE(
      serves(*group_, c10::DeviceType::CPU),
      "the ranks of a pipeline exchange messages over the CPU, for which their group has no "
      "backend (group: ",
      group_->getBackendName(),
      "); make it with gloo: init_process_group(\"gloo\"), or "
      "\"cpu:gloo,cuda:nccl\" for stages on CUDA devices");
  if (device.is_cpu() || make_pair_) {
    device_ = device;
    return;
  }
  TORCH_CHECK_VALUE(device.is_cuda(),
                    "stages of several processes are on the CPU or on CUDA devices (device: ",
                    device, "); move them there");
  const bool has_nccl =
      serves(*group_, c10::DeviceType::CUDA) &&
      group_->getBackend(c10::DeviceType::CUDA)->getBackendName().starts_with("nccl");  // or nccl2
  TORCH_CHECK_VALUE(has_nccl, "the group has no NCCL for stages on CUDA devices (device: ", device,
                    "); make it with init_process_group(\"cpu:gloo,cuda:nccl\")");
  device_ = device;
  make_pair_ = [group = group_](const std::string& name, DeviceLane::End end) {
    return nccl_pair(*group, name, static_cast<int>(end));
  };
}

// Each two ranks at once, in an order that is the same everywhere: the first two that have not met wait for no other.
void Peers::connect(int64_t name, const std::vector<int>& rank_of_stage) {
  std::set<std::pair<int, int>> pairs;
  for (size_t stage = 0; stage + 1 < rank_of_stage.size(); ++stage) {
    const auto [low, high] = std::minmax(rank_of_stage[stage], rank_of_stage[stage + 1]);
    if (low != high && (low == rank() || high == rank())) {
      pairs.emplace(low, high);
    }
  }
  const auto prefix = "brimful/pipeline/" + std::to_string(name) + "/";
  watch_.set({}, {});
  std::exception_ptr error;
  for (const auto& [low, high] : pairs) {
    try {
      connect(prefix, low, high);
    } catch (...) {  // others wait for the next ones
      error = error ? error : std::current_exception();
    }
  }
  watch_.set(lanes(), prefix);
  if (error) {
    std::rethrow_exception(error);
  }
  placed_ = rank_of_stage;
}

void Peers::connect(const std::string& prefix, int low, int high) {
  const auto peer = low == rank() ? high : low;
  const auto socket = sockets_ ? open_socket(peer) : nullptr;
  std::unique_ptr<DeviceLane> up;
  std::unique_ptr<DeviceLane> down;
  if (is_on_device()) {
    up = open_lane(prefix, low, high);
    down = open_lane(prefix, high, low);
  } else if (socket == nullptr) {
    return;
  }
  const auto gloo = group_->getBackend(c10::DeviceType::CPU);
  auto& outbox = outboxes_[peer];
  auto& inbox = inboxes_[peer];
  if (outbox == nullptr) {
    outbox = std::make_unique<Outbox>(gloo, peer, device_);
    inbox = std::make_unique<Inbox>(gloo, peer);
  }
  outbox->set({socket, std::move(peer == high ? up : down)});
  inbox->set({socket, std::move(peer == high ? down : up)});
}

// The lower rank opens a door, informs the other one over gloo, and receives whether it came through.
std::shared_ptr<LocalSocket> Peers::open_socket(int peer) {
  const auto timeout = timeout_of(*group_->getBackend(c10::DeviceType::CPU));
  auto name = at::zeros({kDoorBytes}, at::kByte);
  auto came = at::zeros({1}, at::kByte);
  auto* const letters = static_cast<char*>(name.mutable_data_ptr());
  if (rank() < peer) {
    LocalSocket::Door door;
    std::strncpy(letters, door.name().c_str(), kDoorBytes - 1);
    send(peer, name)->wait();
    receive(peer, came);
    return came.item<int64_t>() != 0 ? door.accept(timeout) : nullptr;
  }
  receive(peer, name);
  auto socket = LocalSocket::connect(letters, timeout);
  came.fill_(socket != nullptr ? 1 : 0);
  send(peer, came)->wait();
  return socket;
}

std::unique_ptr<DeviceLane> Peers::open_lane(const std::string& prefix, int from, int to) {
  const auto name = prefix + std::to_string(from) + "-" + std::to_string(to);
  const auto end = from == rank() ? DeviceLane::End::sends : DeviceLane::End::receives;
  return std::make_unique<DeviceLane>(make_pair_(name, end), device_, end);
}

void Peers::require_links(const std::vector<int>& rank_of_stage) const {
  TORCH_CHECK_VALUE(
      !is_on_device() || placed_ == rank_of_stage,
      "a schedule places stages on different ranks than this pipeline's first schedule, for which "
      "the devices were connected; place each stage on the same rank in every schedule");
}

std::unique_ptr<Channel> Peers::channel(int from, int to, int number) {
  const bool sends = from == rank();
  const int peer = sends ? to : from;
  const auto outbox = outboxes_.find(peer);
  if (outbox == outboxes_.end()) {
    return std::make_unique<GroupChannel>(group_, peer, first_tag(number));
  }
  return std::make_unique<BoxChannel>(sends ? outbox->second.get() : nullptr,
                                      sends ? nullptr : inboxes_.at(peer).get(), number);
}

bool Peers::has_lost_link() const {
  const auto is_lost = [](const auto& entry) { return entry.second->is_lost(); };
  return !placed_.empty() && (std::any_of(outboxes_.begin(), outboxes_.end(), is_lost) ||
                              std::any_of(inboxes_.begin(), inboxes_.end(), is_lost));
}

std::vector<DeviceLane*> Peers::lanes() const {
  std::vector<DeviceLane*> lanes;
  const auto add = [&](const auto& boxes) {
    for (const auto& [peer, box] : boxes) {
      if (auto* const lane = box->lane()) {
        lanes.push_back(lane);
      }
    }
  };
  add(outboxes_);
  add(inboxes_);
  return lanes;
}

void Peers::drop_links() noexcept {
  placed_.clear();
  watch_.drop();
}

}  // namespace brimful::pipeline
