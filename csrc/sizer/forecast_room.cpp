#include "sizer/forecast_room.h"

#include <brimful/memory/stats.h>

#include <algorithm>
#include <limits>

#include "sizer/step_trace.h"

namespace brimful {
namespace {
// What a step may have beside its pieces and is not rehearsed: BatchNorms' sums, say. On CUDA small blocks, live all the time.
constexpr int64_t kBesideBlockBytes = 512;
constexpr size_t kBesideBlocks = 32;
constexpr int64_t kBesideBytes = kBesideBlockBytes * kBesideBlocks;
constexpr int64_t kShareOfMoreRoom = 64;  // that is worth another look at what does not fit

std::vector<memory::CachingRequest> with_beside(const std::vector<memory::CachingRequest>& pieces,
                                                uint64_t stream) {
  constexpr uint64_t kBehindAll = uint64_t{1} << 62;  // no event, and no address
  std::vector<memory::CachingRequest> requests;
  requests.reserve(kBesideBlocks + pieces.size());
  for (uint64_t i = 0; i < kBesideBlocks; ++i) {
    requests.push_back(
        {memory::CachingRequest::Kind::take, kBehindAll + i, kBesideBlockBytes, stream});
  }
  requests.insert(requests.end(), pieces.begin(), pieces.end());
  return requests;
}
}  // namespace

bool ForecastRoom::is_known(c10::Device device) {
  return device.is_cuda() ? memory::has_cuda_pool() : memory::stats(device).limit_bytes.has_value();
}

ForecastRoom::ForecastRoom(c10::Device device, double margin)
    : margin_(margin),
      capacity_bytes_(memory::capacity_bytes(device)),
      used_bytes_(memory::stats(device).used_bytes),
      room_bytes_(capacity_bytes_ ? *capacity_bytes_ - used_bytes_
                                  : std::numeric_limits<int64_t>::max()) {
  if (device.is_cuda()) {
    pool_ = memory::cuda_pool(device);
  }
}

int64_t ForecastRoom::with_margin(int64_t bytes) const {
  return static_cast<int64_t>(static_cast<double>(bytes) * (1 + margin_)) + kBesideBytes;
}

ForecastRoom::Need ForecastRoom::need(const PeakModel& model, int64_t rows) const {
  if (!pool_) {
    const auto bytes = with_margin(model.peak_bytes(rows));
    return {bytes, bytes, bytes <= room_bytes_};
  }
  auto pool = *pool_;
  const auto kept = static_cast<int64_t>(static_cast<double>(model.peak_bytes(rows)) * margin_);
  pool.room.free_bytes -= kept;
  if (pool.room.allowed_bytes) {
    *pool.room.allowed_bytes -= kept;
  }
  const auto pieces = requests_of(model.trace_at(rows), model.blocks(), pool.stream);
  const auto outcome = pool.replay(with_beside(pieces, pool.stream));
  // With those blocks others may lie better than without.
  const bool fits = !outcome.ran_out && !pool.replay(pieces).ran_out;
  const auto room_bytes = !fits ? room_bytes_ + room_bytes_ / kShareOfMoreRoom + 1
                                : outcome.peak.reserved_bytes + kept - used_bytes_;
  const auto told = outcome.ran_out ? with_margin(model.peak_bytes(rows)) : 0;  // it ended there
  return {std::max(outcome.peak.allocated_bytes - used_bytes_, told), room_bytes, fits};
}

int64_t ForecastRoom::largest_rows(const PeakModel& model, int64_t at_most) const {
  int64_t fits = 0;
  int64_t too_many = at_most + 1;
  while (too_many - fits > 1) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (need(model, middle).fits ? fits : too_many) = middle;
  }
  return fits;
}

}  // namespace brimful
