#include "reducer/record_transport.h"

#include <algorithm>
#include <utility>

#include "reducer/device_wait.h"
#include "reducer/host_group.h"

namespace brimful {

void RecordTransport::end_step() {
  std::vector<float> ms_by_rank;
  ms_by_rank.reserve(records_.size());
  for (const auto& record : records_) {
    ms_by_rank.push_back(record.work_ms);
  }
  parts_.watch.end_step(parts_.attempt.step() - 1, ms_by_rank, parts_.link.traffic->agreeing_ms);
}

std::vector<ControlRecord> InBucket::take() {
  parts_.layout.tail->read();
  records_ = parts_.layout.tail->records();
  end_step();
  return records_;
}

void BetweenHosts::say(const ControlRecord& record, const at::Tensor& loss_sum,
                       const at::Tensor& updated) {
  own_ = with_figures_of_host(record, loss_sum, updated);
  on_device_ = !parts_.link.device.is_cpu();
}

void BetweenHosts::send() {
  const auto bytes = encode(own_);
  parts_.link.count(&Reducer::Counters::host_exchanges);
  exchange_ = parts_.link.hosts()->begin({bytes.begin(), bytes.end()});
}

void BetweenHosts::wait() {
  auto& link = parts_.link;
  parts_.watch.begin_wait();
  if (exchange_ && !link.is_broken()) {
    link.begin_wait();
    link.call([&] {
      link.wait_for(*exchange_->work, c10::kCPU,
                    [&] { require_no_error(link.group, link.device); });
    });
  }
  if (!exchange_ || link.is_broken()) {
    exchange_.reset();
    parts_.launcher.wait_for_all();
  }
}

std::vector<ControlRecord> BetweenHosts::take() {
  std::vector<ControlRecord> records;
  for (const auto& bytes : std::exchange(exchange_, {})->read()) {
    RecordBytes theirs{};
    std::copy_n(bytes.begin(), theirs.size(), theirs.begin());
    records.push_back(decode(theirs));
  }
  sums_are_due_ = true;
  if (on_device_ && worst(records) < Status::retry) {
    records_ = records;
    end_sums();
    add_figures_of_device(records);
  }
  return records;
}

void BetweenHosts::add_figures_of_device(std::vector<ControlRecord>& records) {
  const auto& summed = parts_.layout.tail->records();
  for (size_t rank = 0; rank < records.size(); ++rank) {
    records[rank].loss_sum = summed[rank].loss_sum;
    records[rank].updated = summed[rank].updated;
  }
}

void BetweenHosts::drop_sums() {
  if (std::exchange(sums_are_due_, false)) {
    parts_.launcher.wait_for_all();
    end_step();
  }
}

void BetweenHosts::end_sums() {
  if (sums_are_due_) {
    drop_sums();
    parts_.link.require_whole(parts_.attempt.step() - 1, "a step");
    parts_.layout.tail->read();
  }
}

bool BetweenHosts::has_ended() const {
  return (!exchange_ || exchange_->work->isCompleted()) && parts_.launcher.has_ended();
}

std::unique_ptr<RecordTransport> make_record_transport(const RecordTransport::Parts& parts) {
  if (parts.link.hosts()) {
    return std::make_unique<BetweenHosts>(parts);
  }
  return std::make_unique<InBucket>(parts);
}

}  // namespace brimful
