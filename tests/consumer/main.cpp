// Includes the umbrella alone, and shows that the installed library works outside its build folder.
#include <brimful/brimful.h>

#include <iostream>
#include <mutex>

int main() {
  const c10::Device cpu(c10::kCPU);
  brimful::memory::install();
  brimful::memory::set_limit(cpu, brimful::memory::stats(cpu).used_bytes + (1 << 20));
  bool refused = false;
  try {
    at::empty({16 << 20}, at::kByte);
  } catch (const c10::OutOfMemoryError&) {
    refused = true;
  }
  brimful::memory::set_limit(cpu, std::nullopt);

  std::mutex mutex;
  float sum = 0;
  brimful::run_ranks({}, [&](int rank, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    std::vector<at::Tensor> tensors{at::full({4}, static_cast<float>(rank + 1))};
    group->allreduce(tensors)->wait();
    const std::lock_guard<std::mutex> lock(mutex);
    sum += tensors[0][0].item<float>();
  });

  std::cout << "consumer: brimful " << BRIMFUL_VERSION << ", limit "
            << (refused ? "kept" : "ignored") << ", two ranks' sums " << sum << "\n";
  return refused && sum == 6 ? 0 : 1;
}
