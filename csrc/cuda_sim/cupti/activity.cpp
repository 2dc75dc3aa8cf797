// Records of copies: the copy itself, the call that asked for it, and torch's operator around it. No kernels: none are run.
#include <cupti.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "sim_cupti.h"

namespace {

using External = std::pair<CUpti_ExternalCorrelationKind, uint64_t>;

struct Records {
  std::mutex mutex;
  uint8_t* buffer =
      nullptr;  // of who asks: lent with the first record, given back when it is full or at a flush
  size_t size = 0;
  size_t used = 0;
  CUpti_BuffersCallbackRequestFunc request = nullptr;
  CUpti_BuffersCallbackCompleteFunc complete = nullptr;

  void give_back() {
    if (buffer != nullptr) {
      complete(nullptr, 0, std::exchange(buffer, nullptr), size, used);
    }
  }

  void add(const void* record, size_t bytes) {
    if (buffer != nullptr && used + bytes > size) {
      give_back();
    }
    if (buffer == nullptr) {
      size_t most = 0;  // records; it is not set
      request(&buffer, &size, &most);
      used = 0;
    }
    if (buffer != nullptr && bytes <= size) {
      std::memcpy(buffer + used, record, bytes);
      used += bytes;
    }
  }
};

Records& records() {
  static auto* const the_records = new Records;  // for ever: streams' threads outlive main
  return *the_records;
}

std::array<std::atomic<bool>, CUPTI_ACTIVITY_KIND_COUNT> enabled{};
std::atomic<CUpti_TimestampCallbackFunc> clock_of_asker{nullptr};
std::atomic<uint32_t> calls{0};
thread_local std::vector<External> around;  // the operators that this thread is in

template <typename Record>
void keep(const Record& record) {
  const std::lock_guard lock(records().mutex);
  if (enabled[record.kind] && records().request != nullptr) {
    records().add(&record, sizeof(Record));
  }
}

size_t size_of(CUpti_ActivityKind kind) {
  return kind == CUPTI_ACTIVITY_KIND_MEMCPY    ? sizeof(CUpti_ActivityMemcpy6)
         : kind == CUPTI_ACTIVITY_KIND_RUNTIME ? sizeof(CUpti_ActivityAPI)
                                               : sizeof(CUpti_ActivityExternalCorrelation);
}

CUptiResult enable(CUpti_ActivityKind kind, bool on) {
  if (kind < 0 || kind >= CUPTI_ACTIVITY_KIND_COUNT) {
    return CUPTI_ERROR_INVALID_KIND;
  }
  enabled[kind] = on;
  return CUPTI_SUCCESS;
}

}  // namespace

extern "C" {

uint32_t sim_cupti_new_call() {
  return enabled[CUPTI_ACTIVITY_KIND_MEMCPY] || enabled[CUPTI_ACTIVITY_KIND_RUNTIME] ? ++calls : 0;
}

uint64_t sim_cupti_now() {
  if (const auto clock = clock_of_asker.load()) {
    return clock();
  }
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
}

void sim_cupti_note_call(uint32_t call, uint32_t function, uint64_t start) {
  for (const auto& [kind, id] : around) {
    CUpti_ActivityExternalCorrelation link{};
    link.kind = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION;
    link.externalKind = kind;
    link.externalId = id;
    link.correlationId = call;
    keep(link);
  }
  CUpti_ActivityAPI record{};
  record.kind = CUPTI_ACTIVITY_KIND_RUNTIME;
  record.cbid = function;
  record.start = start;
  record.end = sim_cupti_now();
  record.processId = static_cast<uint32_t>(getpid());
  record.threadId = static_cast<uint32_t>(syscall(SYS_gettid));
  record.correlationId = call;
  keep(record);
}

void sim_cupti_note_copy(const sim_cupti_copy* copy, uint64_t start, uint64_t end) {
  CUpti_ActivityMemcpy6 record{};
  record.kind = CUPTI_ACTIVITY_KIND_MEMCPY;
  record.copyKind = copy->kind;
  record.srcKind = copy->from;
  record.dstKind = copy->to;
  record.bytes = copy->bytes;
  record.start = start;
  record.end = end;
  record.deviceId = copy->device;
  record.contextId = copy->device + 1;
  record.streamId = copy->stream;
  record.correlationId = copy->call;
  record.copyCount = 1;
  keep(record);
}

CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) {
  return enable(kind, true);
}

CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) {
  return enable(kind, false);
}

CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc request,
                                           CUpti_BuffersCallbackCompleteFunc complete) {
  const std::lock_guard lock(records().mutex);
  records().request = request;
  records().complete = complete;
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc clock) {
  clock_of_asker = clock;
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind kind,
                                                   uint64_t id) {
  around.emplace_back(kind, id);
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind kind,
                                                  uint64_t* last) {
  for (auto found = around.rbegin(); found != around.rend(); ++found) {
    if (found->first == kind) {
      if (last != nullptr) {
        *last = found->second;
      }
      around.erase(std::next(found).base());
      return CUPTI_SUCCESS;
    }
  }
  return CUPTI_ERROR_QUEUE_EMPTY;
}

CUptiResult cuptiActivityFlushAll(uint32_t /*flag*/) {
  const std::lock_guard lock(records().mutex);
  records().give_back();
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityGetNextRecord(uint8_t* buffer, size_t bytes, CUpti_Activity** record) {
  auto* next =
      *record == nullptr ? buffer : reinterpret_cast<uint8_t*>(*record) + size_of((*record)->kind);
  if (next >= buffer + bytes) {
    return CUPTI_ERROR_MAX_LIMIT_REACHED;
  }
  *record = reinterpret_cast<CUpti_Activity*>(next);
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext /*context*/, uint32_t /*stream*/,
                                              size_t* dropped) {
  *dropped = 0;
  return CUPTI_SUCCESS;
}
}
