#pragma once
#include <brimful/probes/leak.h>

#include <vector>

#include "bindings/python_heap.h"

namespace brimful {

/// Finds, for each target, a shortest way from a variable of the program to it: `chain` from the variable's value to the
/// target. No chain: nothing of Python holds it. A chain without a root begins in a reference cycle.
struct HolderChain {
  std::optional<PythonRoot> root;
  std::vector<PyObject*> chain;
};
std::vector<HolderChain> find_chains(const PythonHeap& heap, const PythonRoots& roots,
                                     const std::vector<PyObject*>& targets);

/// Path, container, root, kind, length and bounds of a chain, by the program's names.
probes::Holder describe_chain(const HolderChain& chain);

}  // namespace brimful
