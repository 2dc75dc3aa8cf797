#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace sim {

enum { kCudnnSuccess = 0, kCudnnBadParam = 2000, kCudnnNotSupported = 3000 };

/// What is set in a descriptor of the backend, by attribute. As cuDNN does, one that is part of another is shared with it.
/// Of one value: double and int64 have 8, float and int32 have 4, half and bfloat16 have 2, else 1.
int64_t bytes_of(int data_type);

struct Content;
using Shared = std::shared_ptr<Content>;

struct Attribute {
  int type;
  int64_t count;
  std::vector<char> bytes;    // of values
  std::vector<Shared> parts;  // of descriptors
};

struct Content {
  int kind;
  std::map<int, Attribute> attributes;

  /// The first descriptor that is this attribute, or null.
  Shared part(int attribute) const;
  /// Its values, or none.
  std::vector<int64_t> numbers(int attribute) const;
  int enumerator(int attribute) const;
};

/// The bytes of workspace that the plan of these operations needs.
size_t workspace_of_graph(const Content& graph);

}  // namespace sim
