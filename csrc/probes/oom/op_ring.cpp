#include <ATen/record_function.h>
#include <brimful/probes/op_ring.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include "base/text_stream.h"
#include "memory/cuda.h"
#include "memory/tensor_bytes.h"
#include "probes/oom/index_check.h"
#include "probes/oom/kept_index.h"

namespace brimful::probes {
namespace {

constexpr size_t kRecords = 256;
constexpr size_t kMostRecords = 16 * kRecords;  // while the device is behind

struct Entry {
  OpRecord record;
  int64_t sequence = -1;  // of autograd: ties a backward node to its forward
  std::vector<KeptIndex> indices;
};

struct Ring {
  std::mutex mutex;
  std::deque<Entry> entries;
  std::map<int64_t, std::string> sites;  // by sequence, of the newest forwards
  OpSite site;
  std::optional<at::CallbackHandle> handle;
  std::atomic<pid_t> owner{0};
};

Ring& ring() {
  static auto* ours = new Ring();  // never destroyed: threads may record while the process ends
  return *ours;
}

std::string to_string(const at::Tensor& tensor) {
  TextStream out;
  out << c10::toString(tensor.scalar_type()) << "[";
  const auto sizes = tensor.sizes();
  for (size_t i = 0; i < sizes.size(); ++i) {
    out << (i == 0 ? "" : ", ") << sizes[i];
  }
  out << "] " << tensor.device().str();
  return out.str();
}

void add_tensors(const c10::IValue& value, std::vector<std::string>& texts) {
  constexpr size_t kMost = 8;
  if (texts.size() >= kMost) {
    return;
  }
  if (value.isTensor() && value.toTensor().defined() &&
      !value.toTensor().unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    texts.push_back(to_string(value.toTensor()));
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      add_tensors(tensor, texts);
    }
  }
}

/// Operators that may make a handle or a workspace of cuDNN or cuBLAS.
bool uses_library(std::string_view op) {
  constexpr std::array<std::string_view, 9> kOps{"aten::convolution",
                                                 "aten::cudnn_convolution",
                                                 "aten::convolution_backward",
                                                 "aten::mm",
                                                 "aten::addmm",
                                                 "aten::bmm",
                                                 "aten::baddbmm",
                                                 "aten::linear",
                                                 "aten::_cudnn_rnn"};
  return std::find(kOps.begin(), kOps.end(), op) != kOps.end();
}

int64_t input_bytes_of(c10::ArrayRef<const c10::IValue> inputs) {
  int64_t bytes = 0;
  for (const auto& input : inputs) {
    bytes += input.isTensor() ? memory::bytes_of(input.toTensor()) : 0;
  }
  return bytes;
}

/// An operator whose indices have not come is one that the device has still to run, as what follows it.
void trim(std::deque<Entry>& entries) {
  const auto pending = [](const KeptIndex& index) { return index.pending(); };
  while (entries.size() > kRecords) {
    const auto& oldest = entries.front().indices;
    if (entries.size() <= kMostRecords && std::any_of(oldest.begin(), oldest.end(), pending)) {
      return;
    }
    entries.pop_front();
  }
}

void note(const at::RecordFunction& function) {
  const at::DisableRecordFunctionGuard no_more;
  Entry entry;
  entry.record.name = function.name();
  entry.record.backward = function.scope() == at::RecordScope::BACKWARD_FUNCTION;
  entry.sequence = function.seqNr();
  for (const auto& input : function.inputs()) {
    add_tensors(input, entry.record.tensors);
  }
  if (uses_library(entry.record.name)) {
    entry.record.free_bytes = memory::cuda_recent_free_bytes();
    entry.record.input_bytes = input_bytes_of(function.inputs());
  }
  auto& ours = ring();
  if (ours.owner != getpid()) {
    return;  // a child of fork: another thread of the parent may have had the lock
  }
  OpSite site;
  {
    const std::lock_guard lock(ours.mutex);
    site = ours.site;
  }
  entry.record.where = site && !entry.record.backward ? site() : "";  // may take the GIL: no lock
  const auto uses = index_uses(entry.record.name, function.inputs());
  const std::lock_guard lock(ours.mutex);
  for (const auto& use : uses) {
    entry.indices.emplace_back(use);
    entry.record.indices_dropped |= entry.indices.back().dropped();
  }
  if (entry.record.backward) {
    const auto forward = ours.sites.find(entry.sequence);
    entry.record.where = forward == ours.sites.end() ? "" : forward->second;
  } else if (entry.sequence >= 0 && !entry.record.where.empty()) {
    ours.sites.insert_or_assign(entry.sequence, entry.record.where);
    if (ours.sites.size() > kMostRecords) {
      ours.sites.erase(ours.sites.begin());
    }
  }
  ours.entries.push_back(std::move(entry));
  trim(ours.entries);
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  try {
    note(function);
  } catch (...) {  // a record less; the operator goes on
  }
  return nullptr;
}

}  // namespace

std::string to_string(const IndexFinding& finding) {
  const bool below = finding.lowest < finding.first_allowed;
  return (finding.where.empty() ? "" : finding.where + ": ") + finding.op + " got index " +
         std::to_string(below ? finding.lowest : finding.highest) + ", allowed are " +
         std::to_string(finding.first_allowed) + " to " + std::to_string(finding.last_allowed);
}

void start_op_ring(OpSite site) {
  auto& ours = ring();
  {
    const std::lock_guard lock(ours.mutex);
    TORCH_CHECK_VALUE(!ours.handle,
                      "operators are being recorded already; stop the other op_ring first");
    ours.entries.clear();
    ours.sites.clear();
    ours.site = std::move(site);
    ours.owner = getpid();
    ours.handle =
        at::addGlobalCallback(at::RecordFunctionCallback(on_start).needsInputs(true).scopes(
            {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  }
}

void stop_op_ring() {
  auto& ours = ring();
  OpSite site;  // let go without the lock: it may hold Python objects
  const std::lock_guard lock(ours.mutex);
  if (ours.handle) {
    at::removeCallback(*ours.handle);
    ours.handle.reset();
    site.swap(ours.site);
  }
}

void clear_op_ring() {
  auto& ours = ring();
  const std::lock_guard lock(ours.mutex);
  ours.entries.clear();
}

bool op_ring_is_on() {
  auto& ours = ring();
  const std::lock_guard lock(ours.mutex);
  return ours.handle.has_value();
}

std::vector<OpRecord> op_ring_records() {
  auto& ours = ring();
  const std::lock_guard lock(ours.mutex);
  std::vector<OpRecord> records;
  records.reserve(ours.entries.size());
  for (const auto& entry : ours.entries) {
    records.push_back(entry.record);
  }
  return records;
}

std::vector<IndexFinding> op_ring_index_findings() {
  std::vector<Entry> entries;
  {
    auto& ours = ring();
    const std::lock_guard lock(ours.mutex);
    entries.assign(ours.entries.rbegin(), ours.entries.rend());
  }
  const at::DisableRecordFunctionGuard no_more;
  std::vector<IndexFinding> findings;
  for (const auto& [record, sequence, indices] : entries) {
    for (const auto& index : indices) {
      const auto range = index.range();
      if (!range || (range->lowest >= index.first() && range->highest <= index.last())) {
        continue;
      }
      IndexFinding finding{record.name,    record.where,  range->lowest,
                           range->highest, index.first(), index.last()};
      // An operator that calls another one of the list is one finding, reported by the outer one.
      if (!findings.empty() && findings.back().where == finding.where &&
          findings.back().highest == finding.highest && findings.back().lowest == finding.lowest) {
        findings.back() = finding;
      } else {
        findings.push_back(finding);
      }
    }
  }
  return findings;
}

}  // namespace brimful::probes
