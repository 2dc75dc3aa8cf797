#include "reducer/host_offer.h"

#include <brimful/log.h>
#include <brimful/step/control_record.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/format.h"
#include "reducer/device_wait.h"
#include "reducer/host_message.h"
#include "reducer/host_watch.h"

namespace brimful {
namespace {
/// As long as a rank waits for the others in a bucket.
std::chrono::milliseconds timeout_of(const GroupLink& link) {
  const auto backend = link.group->getBackend(link.device.type());
  if (!link.device.is_cpu()) {
    return patience_of(*backend).value_or(kBackendDefaultTimeout);
  }
  try {
    return backend->getBackendOptions()->timeout;
  } catch (const std::exception&) {  // it does not say
    return kBackendDefaultTimeout;
  }
}

/// What waits for the group's device goes on.
void abort_device(const c10::weak_intrusive_ptr<c10d::ProcessGroup>& weak, const char* why) {
  try {
    if (const auto group = weak.lock()) {
      log(LogLevel::error, std::string(why) + ": the process group is aborted");
      traffic_of(group.get())->aborting.abort(*group);
    }
  } catch (const std::exception& e) {
    log(LogLevel::warning, std::string("could not abort the process group: ") + e.what());
  }
}

/// A device waits for a dead rank until its group's timeout, and so does whoever waits for the device: the group is aborted
/// once a connection shows it. Where it is not known why the connection ended, the timeout stands.
HostGroup::Watch watch_of(const GroupLink& link) {
  if (link.device.is_cpu() || link.traffic->is_dead) {
    return {};
  }
  const auto weak = c10::weak_intrusive_ptr<c10d::ProcessGroup>(link.group);
  auto watch = watch_by(link.store, link.key + "hosts/", link.rank, link.world_size, [=] {
    abort_device(weak, "the connection to another rank's host has ended");
  });
  watch.overdue = [=] { abort_device(weak, "a step's sums did not end in time"); };
  return watch;
}
}  // namespace

HostOffer::HostOffer(GroupLink& link, bool wanted) : link_(link) {
  if (!wanted || link.world_size == 1) {
    return;
  }
  if (const auto hosts = link.traffic->hosts.lock(); hosts && hosts->is_whole()) {
    state_ = State::connected;
    number_ = link.traffic->hosts_number;
    link.use_hosts(hosts);
    return;
  }
  try {
    connector_ = HostConnector(link.group, link.store);
    state_ = State::possible;
  } catch (const std::exception&) {
    state_ = State::impossible;
    why_not_ = to_string(std::current_exception());
  }
}

void HostOffer::settle(const std::vector<Said>& by_rank) {
  const auto all = [&](const auto& holds) {
    return std::all_of(by_rank.begin(), by_rank.end(), holds);
  };
  if (all([&](const Said& theirs) { return theirs == said(); }) &&
      (state_ == State::connected || state_ == State::unwanted)) {
    return;
  }
  link_.use_hosts(nullptr);
  if (!all(
          [](const Said& theirs) { return theirs[0] >= static_cast<uint64_t>(State::possible); })) {
    log_why(by_rank);
    return;
  }
  connect();
}

void HostOffer::connect() {
  c10::intrusive_ptr<c10d::Backend> backend;
  std::vector<uint8_t> connected(kRecordBytes);
  try {
    if (!connector_) {
      connector_ = HostConnector(link_.group, link_.store);  // this rank's are of another reducer
    }
    backend = connector_->connect(link_.key + "hosts");
    connected[0] = 1;
  } catch (const std::exception&) {
    why_not_ = to_string(std::current_exception());
  }
  std::vector<Said> by_rank;
  for (const auto& theirs : exchange_bytes(link_.group, link_.device, connected)) {
    const auto state = theirs[0] != 0 ? State::possible : State::impossible;
    by_rank.push_back({static_cast<uint64_t>(state), 0});
  }
  if (std::any_of(by_rank.begin(), by_rank.end(), [](const Said& theirs) {
        return theirs[0] == static_cast<uint64_t>(State::impossible);
      })) {
    log_why(by_rank);
    return;
  }
  link_.use_hosts(std::make_shared<HostGroup>(std::move(backend), kHostMessageBytes,
                                              timeout_of(link_), watch_of(link_)));
  link_.traffic->note_hosts(link_.hosts(), link_.number);
}

void HostOffer::log_why(const std::vector<Said>& by_rank) const {
  if (!link_.traffic->note_missing_hosts()) {
    return;
  }
  std::vector<int> without;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (by_rank[rank][0] < static_cast<uint64_t>(State::possible)) {
      without.push_back(static_cast<int>(rank));
    }
  }
  log(LogLevel::warning,
      "the ranks agree on their steps in the last bucket, and not between hosts, on all ranks "
      "(ranks that cannot, or "
      "do not want to, connect their hosts: " +
          format_list(without) + (why_not_.empty() ? "" : "; here: " + why_not_) + ")");
}

}  // namespace brimful
