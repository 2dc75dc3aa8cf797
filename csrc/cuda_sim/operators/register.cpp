// Operators for the simulated devices. When this library is loaded, each operator that has a CUDA kernel and a CPU kernel
// gets a stand-in for the first. Results are blocks of CUDA's real caching allocator.
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <memory>
#include <set>
#include <string>

#include "call.h"
#include "copy.h"
#include "native.h"
#include "replay.h"
#include "without_cpu_kernel.h"
#include "workspace.h"

namespace sim_operators {
namespace {

/// Without a CUDA kernel of their own, but with choices inside that end in cuDNN, cuBLAS or a kernel.
const std::set<std::string> kComposite = {
    "aten::convolution",
    "aten::convolution_backward",
    "aten::convolution_overrideable",
    "aten::ldexp.Tensor",
    "aten::ldexp.out",
    "aten::ldexp_",
};

std::set<std::string> names_with_stand_in() {
  auto& dispatcher = c10::Dispatcher::singleton();
  std::set<std::string> all = kComposite;
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    all.insert(c10::toString(name));
  }
  std::set<std::string> found;
  for (const std::string& name : all) {
    if (!name.starts_with("aten::") || kWithoutValues.contains(name) ||
        kMakeMemory.contains(name)) {
      continue;
    }
    const size_t dot = name.find('.');
    const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
    const auto op = dispatcher.findSchema({name.substr(0, dot), overload});
    if (op && op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
      found.insert(name);
    }
  }
  return found;
}

/// Each stand-in takes the place of a kernel, of which torch warns.
struct Quiet : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

std::unique_ptr<torch::Library> install() {
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten",
                                                  c10::DispatchKey::CUDA, __FILE__, __LINE__);
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  for (const std::string& name : names_with_stand_in()) {
    library->impl(
        name.c_str(),
        is_replayed(name)       ? torch::CppFunction::makeFromBoxedFunction<&call_replayed>()
        : takes_workspace(name) ? torch::CppFunction::makeFromBoxedFunction<&call_with_workspace>()
        : takes_convolution_workspace(name)
            ? torch::CppFunction::makeFromBoxedFunction<&call_with_convolution_workspace>()
            : torch::CppFunction::makeFromBoxedFunction<&call_on_cpu>());
  }
  library->impl("copy_", TORCH_FN(copy_));
  implement_without_cpu_kernel(*library);
  // What torch would choose for a device of this kind and has no stand-in.
  at::globalContext().setUserEnabledCuDNN(false);
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
  return library;
}

const std::unique_ptr<torch::Library> installed = install();

}  // namespace
}  // namespace sim_operators
