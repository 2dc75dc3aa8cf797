#include "reducer/host_connector.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <utility>

#include "base/block_sigpipe.h"

#ifdef BRIMFUL_USE_GLOO
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#endif

namespace brimful {

#ifdef BRIMFUL_USE_GLOO
namespace {
using Gloo = c10d::ProcessGroupGloo;

/// All ranks are at the same point; one that cannot connect shall not cost the others the group's timeout.
constexpr std::chrono::milliseconds kConnectPatience{30000};

/// The user may have chosen a network for the group's own gloo.
c10::intrusive_ptr<Gloo::Options> gloo_options_for(const Group& group) {
  auto options = Gloo::Options::create(kConnectPatience);
  try {
    const auto backend = group->getBackend(c10::DeviceType::CPU);
    if (auto* gloo = dynamic_cast<Gloo*>(backend.get())) {
      options->devices = gloo->getOptions()->devices;
    }
  } catch (const std::exception&) {  // the group has none for the CPU
  }
  if (options->devices.empty()) {
    const BlockSigpipe inherited;
    options->devices.push_back(Gloo::createDefaultDevice());
  }
  return options;
}
}  // namespace

HostConnector::HostConnector(const Group& group, c10::intrusive_ptr<c10d::Store> store)
    : store_(std::move(store)), rank_(group->getRank()), world_size_(group->getSize()) {
  TORCH_CHECK(store_, "the process group has no store (store: null)");
  options_ = gloo_options_for(group);
}

c10::intrusive_ptr<c10d::Backend> HostConnector::connect(const std::string& key) const {
  const BlockSigpipe inherited;
  return c10::make_intrusive<Gloo>(c10::make_intrusive<c10d::PrefixStore>(key, store_), rank_,
                                   world_size_,
                                   c10::static_intrusive_pointer_cast<Gloo::Options>(options_));
}
#else
HostConnector::HostConnector(const Group& group, c10::intrusive_ptr<c10d::Store> store)
    : store_(std::move(store)), rank_(group->getRank()), world_size_(group->getSize()) {
  TORCH_CHECK(false, "brimful was built without gloo");
}

c10::intrusive_ptr<c10d::Backend> HostConnector::connect(const std::string& /*key*/) const {
  return nullptr;  // there is no connector
}
#endif

}  // namespace brimful
