#include "sizer/forecast_room.h"

#include <ATen/Context.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "sizer/step_trace.h"

namespace brimful {
namespace {
// What a step may have beside its pieces and is not rehearsed: BatchNorms' sums, say. On CUDA small blocks, live all the time.
constexpr int64_t kBesideBlockBytes = 512;
constexpr size_t kBesideBlocks = 32;
constexpr int64_t kShareOfMoreRoom = 64;  // that is worth another look at what does not fit
constexpr uint64_t kBehindAll = uint64_t{1}
                                << 62;  // names of blocks that are no event, and no address
constexpr double kMostOffLine = 0.05;  // as a margin: what is off its line is read off as too large
constexpr int64_t kBoundlessBytes = int64_t{1} << 50;

uint64_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<uint64_t>(tensor.storage().data());
}
}  // namespace

bool ForecastRoom::is_known(c10::Device device) {
  return device.is_cuda() ? memory::has_cuda_pool() : memory::stats(device).limit_bytes.has_value();
}

ForecastRoom::ForecastRoom(c10::Device device, double margin, Beside beside)
    : device_(device),
      margin_(margin),
      beside_(beside),
      capacity_bytes_(memory::capacity_bytes(device)),
      used_bytes_(memory::stats(device).used_bytes),
      room_bytes_(capacity_bytes_ ? *capacity_bytes_ - used_bytes_
                                  : std::numeric_limits<int64_t>::max()) {
  if (device.is_cuda()) {
    pool_ = memory::cuda_pool(device);
  }
}

void ForecastRoom::give_room(int64_t bytes) {
  used_bytes_ -= bytes;
  room_bytes_ += capacity_bytes_ ? bytes : 0;
}

void ForecastRoom::leave_out(const std::vector<at::Tensor>& tensors) {
  std::set<uint64_t> seen;
  for (const auto& tensor : tensors) {
    if (tensor.device() == device_ && tensor.has_storage() &&
        seen.insert(address_of(tensor)).second) {
      give_room(pool_ ? memory::give_back_block(pool_->segments, address_of(tensor))
                      : static_cast<int64_t>(tensor.storage().nbytes()));
    }
  }
}

void ForecastRoom::exchange(const std::vector<at::Tensor>& batch, int64_t rows) {
  for (const auto& tensor : batch) {
    if (tensor.device() != device_ || !tensor.has_storage()) {
      continue;
    }
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    const bool is_whole = tensor.storage().nbytes() == tensor.nbytes();
    const auto gone = !pool_     ? bytes
                      : is_whole ? memory::give_back_block(pool_->segments, address_of(tensor))
                                 : 0;
    give_room(gone);
    batch_.push_back(
        {static_cast<double>(bytes) / static_cast<double>(rows), gone > 0 ? 0 : bytes});
  }
}

void ForecastRoom::release_cached() {
  if (pool_) {
    pool_->room.free_bytes += memory::release_cached(pool_->segments);
  }
}

std::vector<memory::CachingRequest> ForecastRoom::requests(const PeakModel& model, int64_t rows,
                                                           Beside beside) const {
  std::vector<memory::CachingRequest> requests;
  const auto take = [&](int64_t bytes) {
    if (bytes > 0) {
      requests.push_back(
          {memory::CachingRequest::Kind::take, kBehindAll + requests.size(), bytes, pool_->stream});
    }
  };
  for (const auto& tensor : batch_) {
    take(std::llround(tensor.bytes_per_row * static_cast<double>(rows)) - tensor.standing_bytes);
  }
  for (size_t i = 0; beside == Beside::small_blocks && i < kBesideBlocks; ++i) {
    take(kBesideBlockBytes);
  }
  const auto pieces = requests_of(model.trace_at(rows), model.blocks(), pool_->stream);
  requests.insert(requests.end(), pieces.begin(), pieces.end());
  return requests;
}

int64_t ForecastRoom::margin_bytes(const PeakModel& model, int64_t rows) const {
  // On CUDA what is off its line is a workspace, whose size a library chooses by the shape.
  const auto share = margin_ + (pool_ ? std::min(model.off_line(), kMostOffLine) : 0);
  return static_cast<int64_t>(static_cast<double>(model.peak_bytes(rows)) * share);
}

bool ForecastRoom::workspaces_unknown() const {
  const auto& context = at::globalContext();
  return pool_ && context.userEnabledCuDNN() && context.benchmarkCuDNN();
}

int64_t ForecastRoom::bytes_on_cpu(const PeakModel& model, int64_t rows) const {
  auto bytes = model.peak_bytes(rows) + margin_bytes(model, rows);
  for (const auto& tensor : batch_) {
    bytes += std::llround(tensor.bytes_per_row * static_cast<double>(rows));
  }
  constexpr auto kBesideBytes = kBesideBlockBytes * static_cast<int64_t>(kBesideBlocks);
  return bytes + (beside_ == Beside::small_blocks ? kBesideBytes : 0);
}

bool ForecastRoom::fits(const PeakModel& model, int64_t rows) const {
  if (!pool_) {
    return bytes_on_cpu(model, rows) <= room_bytes_;
  }
  auto pool = *pool_;
  const auto kept = margin_bytes(model, rows);
  pool.room.free_bytes -= kept;
  if (pool.room.allowed_bytes) {
    *pool.room.allowed_bytes -= kept;
  }
  const auto runs = [&](Beside beside) {
    return !pool.replay(requests(model, rows, beside)).ran_out;
  };
  // With those blocks others may lie better than without.
  return runs(beside_) && (beside_ == Beside::nothing || runs(Beside::nothing));
}

ForecastRoom::Need ForecastRoom::need(const PeakModel& model, int64_t rows) const {
  if (!pool_) {
    const auto bytes = bytes_on_cpu(model, rows);
    return {bytes, bytes, bytes <= room_bytes_};
  }
  const bool does_fit = fits(model, rows);
  auto pool = *pool_;
  if (!does_fit) {
    pool.room.free_bytes = kBoundlessBytes;
    pool.room.allowed_bytes.reset();
  }
  const auto peak = pool.replay(requests(model, rows, beside_)).peak;
  const auto room_bytes = does_fit ? peak.reserved_bytes + margin_bytes(model, rows) - used_bytes_
                                   : room_bytes_ + room_bytes_ / kShareOfMoreRoom + 1;
  return {peak.allocated_bytes - used_bytes_, room_bytes, does_fit, peak.reserved_bytes};
}

int64_t ForecastRoom::largest_rows(const PeakModel& model, int64_t at_most) const {
  int64_t most = 0;
  int64_t too_many = model.largest_rows(room_bytes_, at_most) + 1;  // tensors alone have no room
  while (too_many - most > 1) {
    const int64_t middle = most + (too_many - most) / 2;
    (fits(model, middle) ? most : too_many) = middle;
  }
  return most;
}

}  // namespace brimful
