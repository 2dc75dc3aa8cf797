#include <brimful/memory/categories.h>
#include <brimful/memory/recording.h>
#include <brimful/memory/stats.h>
#include "support/catch.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#ifdef BRIMFUL_USE_CUDA
#include <ATen/cuda/CUDAContextLight.h>
#endif

#include <future>
#include <mutex>
#include <numeric>
#include "memory/block_table.h"

namespace test_categories {

using namespace brimful::memory;

namespace {

struct Tracking {
  Tracking() {
    reset_peak(c10::DeviceType::CPU);
    start_tracking();
  }
  ~Tracking() { stop_tracking(); }
};

c10::DataPtr take(size_t bytes) {
  return c10::GetCPUAllocator()->allocate(bytes);
}

int64_t of(const CategoryBytes& bytes, Category category) {
  return bytes[static_cast<size_t>(category)];
}

int64_t sum_of(const CategoryBytes& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

Label label(const at::Tensor& tensor, Category category) {
  return label_of(tensor.storage(), category).value();
}

}  // namespace

// weight 64 x 8, batch 4 x 64, y = batch weight 4 x 8; loss = sum(y^2). The peak is when mm's backward holds both the
// gradient of y and that of the weight; y is gone by then.
TEST_CASE("The peak's categories are those of a count by hand", "[memory][categories]") {
  const Tracking tracking;
  const int64_t before = stats(c10::DeviceType::CPU).used_bytes;
  const auto weight = at::randn({64, 8}).requires_grad_();
  const auto batch = at::randn({4, 64});
  {
    const auto loss = batch.mm(weight).square().sum();
    loss.backward();
  }
  const auto peak = peak_by_category(c10::DeviceType::CPU, {label(weight, Category::parameters)});
  CHECK(peak.bytes == stats(c10::DeviceType::CPU).peak_bytes);
  CHECK(sum_of(peak.by_category) == peak.bytes);
  CHECK(of(peak.by_category, Category::parameters) == 64 * 8 * 4);
  CHECK(of(peak.by_category, Category::gradients) == 64 * 8 * 4);
  CHECK(of(peak.by_category, Category::temporaries) == 4 * 8 * 4);
  CHECK(of(peak.by_category, Category::other) == before + 4 * 64 * 4);
  CHECK(peak.before_bytes == before);
  CHECK(peak.phase == Phase::backward);
}

TEST_CASE("What outlives its phase is distinguished from what does not", "[memory][categories]") {
  const Tracking tracking;
  const auto leaf = at::randn({100}).requires_grad_();
  const auto y = leaf.exp();  // saved
  CHECK(of(live_by_category(), Category::activations) == 400);
  {
    const auto big =
        y.detach() + at::zeros({100'000}).narrow(0, 0, 100);  // 400 kB, freed in forward
  }
  const auto peak = peak_by_category();
  CHECK(of(peak.by_category, Category::temporaries) == 400'000 + 400);
  CHECK(of(peak.by_category, Category::activations) == 400);
}

TEST_CASE("An earlier step's leftovers of a forward are no activations", "[memory][categories]") {
  const Tracking tracking;
  const auto leaf = at::randn({100}).requires_grad_();
  const auto kept = leaf.exp();
  mark_step();
  const auto again = leaf.exp();
  const auto peak = peak_by_category();
  CHECK(of(peak.by_category, Category::activations) == 400);
}

TEST_CASE("A scope gives blocks a category for life", "[memory][categories]") {
  const Tracking tracking;
  {
    const CategoryScope scope(Category::communication);
    const auto bucket = at::zeros({250});
    const auto peak = peak_by_category(c10::DeviceType::CPU, {label(bucket, Category::gradients)});
    CHECK(of(peak.by_category, Category::communication) == 1000);
  }
  CHECK(of(peak_by_category().by_category, Category::communication) == 1000);
}

TEST_CASE("A label of a block from before is taken off the rest", "[memory][categories]") {
  brimful::memory::install();
  const auto weight = at::zeros({100});
  const Tracking tracking;
  const auto block = take(50);
  const auto without = peak_by_category();
  const auto with = peak_by_category(c10::DeviceType::CPU, {label(weight, Category::parameters)});
  CHECK(with.bytes == without.bytes);
  CHECK(of(with.by_category, Category::parameters) == 400);
  CHECK(of(with.by_category, Category::other) == of(without.by_category, Category::other) - 400);
  CHECK(sum_of(with.by_category) == with.bytes);
}

TEST_CASE("A freed block of the peak is no later one at its address", "[memory][categories]") {
  BlockTable table;
  const std::lock_guard lock(table.mutex());
  table.start(1, 0, nullptr);
  const int somewhere = 0;
  const auto first = table.born({}, 100, 100, &somewhere);
  table.died(first, {});
  table.born({}, 100, 100, &somewhere);
  REQUIRE(table.peak_blocks().size() == 1);
  CHECK(table.peak_blocks()[0].slot == 0);  // so that no label reaches it
  table.reset_peak(100);
  REQUIRE(table.peak_blocks().size() == 1);
  CHECK(table.peak_blocks()[0].slot != 0);
}

TEST_CASE("Nothing of the peak is lost, however much is freed since", "[memory][categories]") {
  const Tracking tracking;
  std::vector<c10::DataPtr> blocks;
  for (int k = 1; k <= 500; ++k) {
    const CategoryScope scope(k % 2 == 0 ? Category::workspace : Category::communication);
    blocks.push_back(take(k));
  }
  const int64_t at_peak = stats(c10::DeviceType::CPU).used_bytes;
  blocks.clear();
  for (int k = 0; k < 1000; ++k) {
    take(7);
  }
  const auto peak = peak_by_category();
  CHECK(peak.bytes == at_peak);
  CHECK(of(peak.by_category, Category::workspace) == 250 * 251);
  CHECK(of(peak.by_category, Category::communication) == 250 * 250);
  CHECK(sum_of(peak.by_category) == peak.bytes);
}

TEST_CASE("A peak outlives the tracking, and moves when it is reset", "[memory][categories]") {
  {
    const Tracking tracking;
    auto big = take(5000);
    big.clear();
    const auto small = take(20);
    reset_peak(c10::DeviceType::CPU);
    const auto more = take(30);
    CHECK(peak_by_category().bytes == stats(c10::DeviceType::CPU).peak_bytes);
    CHECK(peak_by_category().bytes == stats(c10::DeviceType::CPU).used_bytes);
  }
  const auto peak = peak_by_category();
  CHECK(sum_of(peak.by_category) == peak.bytes);
  REQUIRE(peak.by_site.size() == 1);
  CHECK(peak.by_site[0].bytes == 50);
}

#ifdef BRIMFUL_USE_CUDA
namespace {

using Workspace = decltype(at::cuda::WorkspaceMapWithMutex::map)::mapped_type;
constexpr bool kHasSize = !std::is_same_v<Workspace, c10::DataPtr>;  // else torch asks the GPU

void fill(std::pair<c10::DataPtr, size_t>& workspace, size_t bytes) {
  workspace = {take(bytes), bytes};
}
[[maybe_unused]] void fill(c10::DataPtr& workspace, size_t bytes) {
  workspace = take(bytes);
}

/// As torch keeps them for a handle and a stream, but on the CPU.
struct KeptWorkspace {
  KeptWorkspace(at::cuda::WorkspaceMapWithMutex& of, size_t bytes) : kept(of) {
    fill(kept.map[{this, this}], bytes);
  }
  ~KeptWorkspace() { kept.map.erase({this, this}); }
  KeptWorkspace(const KeptWorkspace&) = delete;
  KeptWorkspace& operator=(const KeptWorkspace&) = delete;
  at::cuda::WorkspaceMapWithMutex& kept;
};

}  // namespace

TEST_CASE("What torch keeps for cuBLAS is workspace", "[memory][categories]") {
  if (!kHasSize) {
    return;
  }
  install();
  const KeptWorkspace before(at::cuda::cublas_handle_stream_to_workspace(), 1000);
  const Tracking tracking;
  start_recording(int64_t{1} << 20);
  const KeptWorkspace since(at::cuda::cublaslt_handle_stream_to_workspace(), 200);
  const auto peak = peak_by_category();
  CHECK(of(peak.by_category, Category::workspace) == 1200);
  CHECK(sum_of(peak.by_category) == peak.bytes);
  CHECK(of(live_by_category(), Category::workspace) == 1200);
  const auto recording = stop_recording();
  REQUIRE(recording.devices.at(0).blocks.size() == 1);
  CHECK(recording.devices[0].blocks[0].category == Category::workspace);
  CHECK(of(recording.devices[0].labelled, Category::workspace) == 1000);
  const std::unique_lock changing(since.kept.mutex);
  auto live = std::async(std::launch::async, [] { return live_by_category(); });
  CHECK(of(live.get(), Category::workspace) == 1000);
}
#endif

}  // namespace test_categories
