// cuDNN's backend without arithmetic: descriptors keep what is set. Heuristics know one engine, whose plan needs the
// workspace that workspace.cpp says. After it they know one without, which torch takes if that workspace is refused.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "descriptor.h"

namespace {

using sim::Attribute;
using sim::Content;
using sim::kCudnnBadParam;
using sim::kCudnnSuccess;
using sim::Shared;

// As cudnn_graph.h has them.
enum {
  kHandle = 0,
  kBoolean = 2,
  kInt64 = 3,
  kDouble = 5,
  kVoidPointer = 6,
  kDescriptor = 15,
  kInt32 = 23,
  kChar = 24,
  kFraction = 26
};
enum { kEngine = 2, kEngineConfig = 3, kHeuristics = 4, kPlan = 5 };
enum {
  kHeuristicsGraph = 201,
  kHeuristicsResults = 202,
  kConfigEngine = 300,
  kPlanConfig = 401,
  kPlanWorkspace = 402,
  kEngineGraph = 1300,
  kEngineIndex = 1301
};

struct Descriptor {
  Shared content;
};

size_t size_of(int type) {
  switch (type) {
    case kBoolean:
    case kChar:
      return 1;
    case kHandle:
    case kInt64:
    case kDouble:
    case kVoidPointer:
    case kDescriptor:
      return 8;
    case kFraction:
      return 16;
    default:
      return 4;  // enumerators, float and int32
  }
}

Attribute value_of(int type, int64_t value) {
  Attribute found{type, 1, std::vector<char>(8), {}};
  std::memcpy(found.bytes.data(), &value, sizeof(value));
  return found;
}

Attribute part_of(Shared part) {
  return {kDescriptor, 1, {}, {std::move(part)}};
}

enum { kWithWorkspace = 0, kWithout = 1 };

/// An engine for these operations, as heuristics give it.
Shared config_for(const Shared& graph, int64_t index) {
  auto engine = std::make_shared<Content>(Content{kEngine, {}});
  engine->attributes[kEngineGraph] = part_of(graph);
  engine->attributes[kEngineIndex] = value_of(kInt64, index);
  auto config = std::make_shared<Content>(Content{kEngineConfig, {}});
  config->attributes[kConfigEngine] = part_of(engine);
  return config;
}

Attribute configs_for(const Shared& graph) {
  Attribute found{kDescriptor, 1, {}, {config_for(graph, kWithWorkspace)}};
  if (sim::workspace_of_graph(*graph) > 0) {
    found.parts.push_back(config_for(graph, kWithout));
    found.count = 2;
  }
  return found;
}

Shared engine_of(const Content& plan) {
  const Shared config = plan.part(kPlanConfig);
  return config == nullptr ? nullptr : config->part(kConfigEngine);
}

bool does_without(const Content& plan) {
  const Shared engine = engine_of(plan);
  return engine != nullptr && engine->numbers(kEngineIndex) == std::vector<int64_t>{kWithout};
}

int64_t workspace_of_plan(const Content& plan) {
  const Shared engine = engine_of(plan);
  const Shared graph = engine == nullptr ? nullptr : engine->part(kEngineGraph);
  return graph == nullptr || does_without(plan)
             ? 0
             : static_cast<int64_t>(sim::workspace_of_graph(*graph));
}

std::atomic<long> done_without = 0;

void say_done_without() {
  if (done_without > 0) {
    std::fprintf(stderr,
                 "simulated CUDA: cuDNN did without workspaces, for which there was no memory "
                 "(operations: %ld)\n",
                 done_without.load());
  }
}

void note_execution(const Content& plan) {
  if (does_without(plan) && done_without++ == 0) {
    std::atexit(&say_done_without);
  }
}

/// What is asked and was not set: notes and knobs there are none, and numbers are 0.
Attribute answer(const Content& content, int attribute, int type) {
  const auto found = content.attributes.find(attribute);
  if (found != content.attributes.end()) {
    return found->second;
  }
  if (attribute == kHeuristicsResults) {
    const Shared graph = content.part(kHeuristicsGraph);
    return graph == nullptr ? Attribute{type, 0, {}, {}} : configs_for(graph);
  }
  if (attribute == kPlanWorkspace) {
    return value_of(kInt64, workspace_of_plan(content));
  }
  const bool number = type == kInt64 || type == kInt32;
  return number ? value_of(type, 0) : Attribute{type, 0, {}, {}};
}

}  // namespace

namespace sim {

Shared Content::part(int attribute) const {
  const auto found = attributes.find(attribute);
  return found == attributes.end() || found->second.parts.empty() ? nullptr
                                                                  : found->second.parts[0];
}

std::vector<int64_t> Content::numbers(int attribute) const {
  const auto found = attributes.find(attribute);
  std::vector<int64_t> all;
  if (found != attributes.end() && found->second.type == kInt64) {
    all.resize(found->second.count);
    std::memcpy(all.data(), found->second.bytes.data(), all.size() * sizeof(int64_t));
  }
  return all;
}

int Content::enumerator(int attribute) const {
  const auto found = attributes.find(attribute);
  int value = -1;
  if (found != attributes.end() && found->second.bytes.size() >= sizeof(value)) {
    std::memcpy(&value, found->second.bytes.data(), sizeof(value));
  }
  return value;
}

}  // namespace sim

extern "C" {

int cudnnBackendCreateDescriptor(int kind, void** descriptor) {
  *descriptor = new Descriptor{std::make_shared<Content>(Content{kind, {}})};
  return kCudnnSuccess;
}

int cudnnBackendInitialize(void* /*descriptor*/) {
  return kCudnnSuccess;
}

int cudnnBackendDestroyDescriptor(void* descriptor) {
  delete static_cast<Descriptor*>(descriptor);
  return kCudnnSuccess;
}

int cudnnBackendFinalize(void* descriptor) {
  return descriptor == nullptr ? kCudnnBadParam : kCudnnSuccess;
}

int cudnnBackendSetAttribute(void* descriptor, int attribute, int type, int64_t count,
                             const void* values) {
  if (descriptor == nullptr || count < 0 || (count > 0 && values == nullptr)) {
    return kCudnnBadParam;
  }
  Attribute kept{type, count, {}, {}};
  if (type == kDescriptor) {
    const auto* parts = static_cast<Descriptor* const*>(values);
    for (int64_t k = 0; k < count; ++k) {
      kept.parts.push_back(parts[k] == nullptr ? nullptr : parts[k]->content);
    }
  } else {
    const auto* bytes = static_cast<const char*>(values);
    kept.bytes.assign(bytes, bytes + count * size_of(type));
  }
  static_cast<Descriptor*>(descriptor)->content->attributes[attribute] = std::move(kept);
  return kCudnnSuccess;
}

int cudnnBackendGetAttribute(void* descriptor, int attribute, int type, int64_t wanted,
                             int64_t* count, void* values) {
  if (descriptor == nullptr) {
    return kCudnnBadParam;
  }
  const Attribute found = answer(*static_cast<Descriptor*>(descriptor)->content, attribute, type);
  const int64_t given = std::min(wanted, found.count);
  if (count != nullptr) {
    *count = values == nullptr ? found.count : given;  // torch takes as many to be there
  }
  if (values == nullptr) {
    return kCudnnSuccess;
  }
  if (found.type == kDescriptor) {
    auto* parts = static_cast<Descriptor**>(values);
    for (int64_t k = 0; k < given; ++k) {
      parts[k]->content = found.parts[k];
    }
  } else {
    std::memcpy(values, found.bytes.data(), given * size_of(found.type));
  }
  return kCudnnSuccess;
}

int cudnnBackendExecute(void* /*handle*/, void* plan, void* /*pack*/) {
  if (plan == nullptr) {
    return kCudnnBadParam;
  }
  note_execution(*static_cast<Descriptor*>(plan)->content);
  return kCudnnSuccess;
}
}
