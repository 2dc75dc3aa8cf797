#include "reducer/record_transport.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "reducer/device_wait.h"
#include "reducer/host_group.h"
#include "step/sums_of.h"

namespace brimful {
namespace {
bool can_queue(const GroupLink& link) {
  return !link.device.is_cpu() && (link.alone || waits_in_streams(*link.group, link.device));
}
}  // namespace

void RecordTransport::end_step() {
  std::vector<float> ms_by_rank;
  ms_by_rank.reserve(records_.size());
  for (const auto& record : records_) {
    ms_by_rank.push_back(record.work_ms);
  }
  parts_.watch.end_step(parts_.attempt.step() - 1, ms_by_rank, parts_.link.traffic->agreeing_ms);
}

std::vector<ControlRecord> InBucket::take() {
  auto& head = parts_.layout.tail->head();
  head.read();
  records_ = head.records();
  end_step();
  return records_;
}

OwnRecord::OwnRecord(const Parts& parts) : RecordTransport(parts), queues_(can_queue(parts.link)) {}

void OwnRecord::say(const Announcement& said, const at::Tensor& updated) {
  own_ = said;
  own_.record = with_figures_of_host(said, updated);
}

void OwnRecord::wait() {
  sums_are_due_ = true;
  if (!queues_) {
    drop_sums();
  }
}

std::vector<ControlRecord> OwnRecord::take() {
  auto& head = parts_.layout.tail->head();
  head.take({head.own_sizes()}, {head.more()});
  records_ = {own_.record};
  if (!queues_) {
    end_step();
  }
  return records_;
}

std::shared_ptr<const LateSums> OwnRecord::take_sums() {
  const auto own = std::exchange(own_, {});
  const bool is_late = own.loss_sum.defined() && !own.loss_sum.is_cpu();
  return is_late && own.record.verdict < Status::retry ? sums_of(own) : nullptr;
}

void OwnRecord::end_sums() {
  if (std::exchange(sums_are_due_, false)) {
    parts_.launcher.queue_waits();
    end_step();
  }
}

void OwnRecord::drop_sums() {
  if (std::exchange(sums_are_due_, false)) {
    parts_.launcher.wait_for_all();
  }
}

BetweenHosts::BetweenHosts(const Parts& parts)
    : RecordTransport(parts),
      queues_(can_queue(parts.link) && !parts.link.traffic->is_dead),
      under_way_(parts.link) {}

void BetweenHosts::say(const Announcement& said, const at::Tensor& updated) {
  const auto& head = parts_.layout.tail->head();
  own_ = {with_figures_of_host(said, updated), head.own_sizes(), head.has_more()};
}

void BetweenHosts::send() {
  parts_.link.count(&Reducer::Counters::host_exchanges);
  exchange_ = parts_.link.hosts()->begin(encode(own_));
}

void BetweenHosts::wait_for(Exchange& exchange) {
  auto& link = parts_.link;
  link.begin_wait();
  link.call([&] {
    const auto failed = thrown_by([&] {
      link.wait_for(*exchange.work, c10::kCPU, [&] {
        require_no_error(link.group, link.device);
        under_way_.look();
        if (link.is_broken()) {
          std::rethrow_exception(link.error());
        }
      });
    });
    if (failed) {
      std::rethrow_exception(under_way_.named(failed));
    }
  });
}

void BetweenHosts::wait() {
  parts_.watch.begin_wait();
  if (exchange_ && !parts_.link.is_broken()) {
    wait_for(*exchange_);
  }
  if (!exchange_ || parts_.link.is_broken()) {
    exchange_.reset();
    parts_.launcher.wait_for_all();
  }
}

std::vector<ControlRecord> BetweenHosts::take() {
  std::vector<HostMessage> messages;
  std::vector<ControlRecord> records;
  for (const auto& bytes : std::exchange(exchange_, {})->read()) {
    messages.push_back(decode_message(bytes));
    records.push_back(messages.back().record);
  }
  sums_are_due_ = true;
  if (worst(records) < Status::retry) {
    take_head(messages);
  }
  return records;
}

void BetweenHosts::take_head(const std::vector<HostMessage>& messages) {
  std::vector<uint64_t> sizes;
  bool more = false;
  for (const auto& theirs : messages) {
    sizes.push_back(theirs.sizes);
    more = more || theirs.more;
  }
  parts_.layout.tail->head().take(sizes,
                                  more ? exchange_more() : std::vector<std::vector<uint8_t>>());
}

std::vector<std::vector<uint8_t>> BetweenHosts::exchange_more() {
  auto& link = parts_.link;
  const auto own = parts_.layout.tail->head().more();
  const auto part_bytes = static_cast<size_t>(kHostMessageBytes);
  std::vector<Exchange> parts;
  for (size_t begin = 0; begin < own.size(); begin += part_bytes) {
    std::vector<uint8_t> part(part_bytes);
    std::copy_n(own.begin() + static_cast<std::ptrdiff_t>(begin),
                std::min(part_bytes, own.size() - begin), part.begin());
    link.count(&Reducer::Counters::host_exchanges);
    parts.push_back(link.hosts()->begin(part));
  }
  std::vector<std::vector<uint8_t>> all(link.world_size);
  for (auto& part : parts) {
    wait_for(part);
    require_whole();
    const auto by_rank = part.read();
    for (size_t rank = 0; rank < all.size(); ++rank) {
      all[rank].insert(all[rank].end(), by_rank[rank].begin(), by_rank[rank].end());
    }
  }
  return all;
}

void BetweenHosts::require_whole() {
  parts_.link.require_whole(under_way_.oldest_step().value_or(parts_.attempt.step() - 1), "a step");
}

/// Those of a managed step, whose tail has them.
std::shared_ptr<const LateSums> BetweenHosts::take_sums() {
  if (parts_.link.device.is_cpu() || parts_.attempt.is_of_loop() ||
      worst(records_) >= Status::retry) {
    return nullptr;
  }
  end_sums();
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  const auto& head = parts_.layout.tail->head();
  const auto weights = has_late_weight(records_) ? head.late_weights() : at::Tensor();
  return std::make_shared<LateSums>(head.losses(), weights, known_weight(records_));
}

void BetweenHosts::drop_sums() {
  if (std::exchange(sums_are_due_, false)) {
    parts_.launcher.wait_for_all();
    end_step();
  }
}

void BetweenHosts::end_sums() {
  if (!sums_are_due_) {
    return;
  }
  if (queues_) {
    sums_are_due_ = false;
    if (const auto last = parts_.launcher.queue_waits()) {
      under_way_.add(parts_.attempt.step() - 1, last);
      parts_.link.hosts()->expect(last);
    }
    end_step();
  } else {
    drop_sums();
  }
  require_whole();
}

void BetweenHosts::require_sums() {
  under_way_.look();
  require_whole();
}

void BetweenHosts::wait_for_sums() {
  under_way_.wait();
  require_whole();
}

bool BetweenHosts::has_ended() const {
  return (!exchange_ || exchange_->work->isCompleted()) && parts_.launcher.has_ended() &&
         under_way_.have_ended();
}

std::unique_ptr<RecordTransport> make_record_transport(const RecordTransport::Parts& parts) {
  if (parts.link.world_size == 1) {
    return std::make_unique<OwnRecord>(parts);
  }
  if (parts.link.hosts()) {
    return std::make_unique<BetweenHosts>(parts);
  }
  return std::make_unique<InBucket>(parts);
}

}  // namespace brimful
