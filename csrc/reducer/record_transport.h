#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/step/control_record.h>
#include <brimful/step/late_sums.h>

#include <memory>
#include <optional>
#include <vector>

#include "reducer/attempt.h"
#include "reducer/host_message.h"
#include "reducer/launcher.h"
#include "reducer/sums_under_way.h"

namespace brimful {

/// How the control record of each rank comes to all ranks in an attempt, and when they know it.
class RecordTransport {
 public:
  /// An engine's, which outlives this.
  struct Parts {
    GroupLink& link;
    BucketSet& layout;
    Launcher& launcher;
    Stopwatch& watch;
    const Attempt& attempt;
  };
  explicit RecordTransport(const Parts& parts) : parts_(parts) {}
  virtual ~RecordTransport() = default;
  RecordTransport(const RecordTransport&) = delete;
  RecordTransport& operator=(const RecordTransport&) = delete;

  /// Of this rank, once its tail is written; arguments as TailHead::Contents.
  virtual void say(const Announcement& said, const at::Tensor& updated) = 0;
  /// See ParticipantAttempt.
  virtual bool takes_late_weight() const { return !parts_.link.device.is_cpu(); }
  /// The last bucket was launched.
  virtual void send() = 0;
  /// Until all ranks' records are here, or the group is broken; in a step that has launched no last bucket, until its other
  /// ones have ended.
  virtual void wait() = 0;
  /// After wait(), of an attempt that has ended and whose group is whole.
  /// @throws RankFailed if the group breaks
  const std::vector<ControlRecord>& read() { return records_ = take(); }
  const std::vector<ControlRecord>& records() const { return records_; }
  /// The sums, and all that rides beside them, are here, or the current stream waits for them.
  /// @throws RankFailed if the group breaks meanwhile
  virtual void end_sums() = 0;
  /// Of the attempt that read() was for, if it stands and its records have none.
  virtual std::shared_ptr<const LateSums> take_sums() { return nullptr; }
  /// Looks at sums of earlier steps that a stream was made to wait for. Waits for nothing.
  /// @throws RankFailed if they have failed
  virtual void require_sums() {}
  /// Waits for them.
  /// @throws RankFailed if they fail
  virtual void wait_for_sums() {}
  /// The buckets may be filled anew, whatever came.
  virtual void drop_sums() = 0;
  /// What this rank owes the others has reached them, as far as the group knows.
  virtual bool has_ended() const = 0;

 protected:
  virtual std::vector<ControlRecord> take() = 0;
  /// The sums have come.
  void end_step();

  Parts parts_;
  std::vector<ControlRecord> records_;
};

/// In the sum of the last bucket: the wait for the records is that for the bucket.
class InBucket final : public RecordTransport {
 public:
  using RecordTransport::RecordTransport;
  void say(const Announcement& /*said*/, const at::Tensor& /*updated*/) override {}
  bool takes_late_weight() const override { return false; }
  void send() override {}
  void wait() override { parts_.launcher.wait_for_all(); }
  void end_sums() override {}
  void drop_sums() override {}
  bool has_ended() const override { return parts_.launcher.has_ended(); }

 private:
  std::vector<ControlRecord> take() override;
};

/// The record of a rank that is alone. Its sums are waited for by its streams, where they can be.
class OwnRecord final : public RecordTransport {
 public:
  explicit OwnRecord(const Parts& parts);
  void say(const Announcement& said, const at::Tensor& updated) override;
  void send() override {}
  void wait() override;
  void end_sums() override;
  void drop_sums() override;
  bool has_ended() const override { return parts_.launcher.has_ended(); }

 private:
  std::vector<ControlRecord> take() override;
  std::shared_ptr<const LateSums> take_sums() override;

  bool queues_ = false;  ///< the streams wait
  Announcement own_;
  bool sums_are_due_ = false;
};

/// Between the hosts, besides the buckets: a verdict waits for no device, and the sums are waited for by the streams that read
/// them. The losses of a managed step follow later.
class BetweenHosts final : public RecordTransport {
 public:
  explicit BetweenHosts(const Parts& parts);
  void say(const Announcement& said, const at::Tensor& updated) override;
  void send() override;
  void wait() override;
  void end_sums() override;
  void require_sums() override;
  void wait_for_sums() override;
  std::shared_ptr<const LateSums> take_sums() override;
  void drop_sums() override;
  bool has_ended() const override;

 private:
  std::vector<ControlRecord> take() override;
  void take_head(const std::vector<HostMessage>& messages);
  /// A second exchange, which all ranks make.
  std::vector<std::vector<uint8_t>> exchange_more();
  void wait_for(Exchange& exchange);
  void require_whole();

  bool queues_ = false;  ///< the streams wait for the sums
  HostMessage own_;
  std::optional<Exchange> exchange_;
  bool sums_are_due_ = false;
  SumsUnderWay under_way_;
};

/// That of the group's reducer.
std::unique_ptr<RecordTransport> make_record_transport(const RecordTransport::Parts& parts);

}  // namespace brimful
