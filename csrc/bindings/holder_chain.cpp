#include <algorithm>
#include <utility>

#include "bindings/holder_path.h"

namespace brimful {
namespace {

constexpr int kMostSteps = 12;

/// The way up from one target.
struct WayUp {
  PyObject* target;
  std::unordered_map<PyObject*, PyObject*> below;  // towards the target
  std::vector<PyObject*> frontier;
  PyObject* top = nullptr;  // where it ended: at a root, or in a cycle
  std::optional<PythonRoot> root;
  bool done = false;

  explicit WayUp(PyObject* object) : target(object), frontier{object} { below[object] = nullptr; }

  void end_at(PyObject* object, PythonRoot found) {
    top = object;
    root = std::move(found);
    done = true;
  }
};

void look_for_locals(WayUp& climb, const PythonRoots& roots) {
  for (PyObject* const object : climb.frontier) {
    if (const auto* local = roots.local(object); local != nullptr && !climb.done) {
      climb.end_at(object, *local);
    }
  }
}

void climb_one(WayUp& climb, const PythonRoots& roots,
               const std::unordered_map<PyObject*, std::vector<PyObject*>>& referrers) {
  std::vector<PyObject*> next;
  for (PyObject* const object : climb.frontier) {
    const auto owners = referrers.find(object);
    if (owners == referrers.end()) {
      continue;
    }
    for (PyObject* const owner : owners->second) {
      if (auto global = roots.global(owner, object)) {
        climb.end_at(object, std::move(*global));
        return;
      }
      if (climb.below.try_emplace(owner, object).second) {
        next.push_back(owner);
      } else {
        climb.top = owner;  // seen before: a cycle, unless a variable is found yet
      }
    }
  }
  climb.frontier = std::move(next);
  climb.done = climb.frontier.empty();
}

HolderChain chain_of(const WayUp& climb) {
  HolderChain found{climb.root, {}};
  const bool is_cycle = climb.done && climb.frontier.empty();
  for (PyObject* at = climb.root || is_cycle ? climb.top : nullptr; at != nullptr;
       at = climb.below.at(at)) {
    found.chain.push_back(at);
  }
  return found;
}

}  // namespace

std::vector<HolderChain> find_chains(const PythonHeap& heap, const PythonRoots& roots,
                                     const std::vector<PyObject*>& targets) {
  std::vector<WayUp> climbs(targets.begin(), targets.end());
  for (int step = 0; step < kMostSteps; ++step) {
    std::unordered_set<PyObject*> wanted;
    for (auto& climb : climbs) {
      if (!climb.done) {
        look_for_locals(climb, roots);
      }
      if (!climb.done) {
        wanted.insert(climb.frontier.begin(), climb.frontier.end());
      }
    }
    if (wanted.empty()) {
      break;
    }
    const auto referrers = heap.referrers(wanted);
    for (auto& climb : climbs) {
      if (!climb.done) {
        climb_one(climb, roots, referrers);
      }
    }
  }
  std::vector<HolderChain> found;
  found.reserve(climbs.size());
  for (const auto& climb : climbs) {
    found.push_back(chain_of(climb));
  }
  return found;
}

}  // namespace brimful
