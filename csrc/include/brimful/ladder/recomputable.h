#pragma once
#include <brimful/ladder/activation_checkpoint.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace brimful {

namespace ladder {
class Modules;
}
namespace detail {
/// A call of a part that is recomputed, as its sizer sees it.
class BRIMFUL_API PartCall {
 public:
  virtual ~PartCall() = default;
  /// Around each run of its function, from any thread.
  virtual void begin_run() = 0;
  virtual void end_run() noexcept = 0;
};

class PartRun {
 public:
  explicit PartRun(PartCall& call) : call_(call) { call_.begin_run(); }
  ~PartRun() { call_.end_run(); }
  PartRun(const PartRun&) = delete;
  PartRun& operator=(const PartRun&) = delete;

 private:
  PartCall& call_;
};
}  // namespace detail

/// Parts of a model that a BatchSizer may recompute where one row does not fit. The program names them where it calls them:
///   brimful::Recomputable parts;
///   options.ladder = parts.modules();  // BatchSizerOptions, of one sizer
///   x = parts("block 0", block, x);    // in the loss function
/// While rows fit that is a plain call. Else the step is repeated with all of them recomputed, which is measured: the next
/// steps recompute only what the room needs, with the same bits in any case.
///
/// Copies name the same parts. One thread calls them, that of the sizer's step.
class BRIMFUL_API Recomputable {
 public:
  explicit Recomputable(CheckpointOptions options = {});

  /// `function(inputs...)`, plainly or as checkpoint() runs it, whose conditions it has to meet. Calls with one name are
  /// recomputed together. A part inside another one is run as that one is. What `name` says is in Outcome::rungs.
  template <typename Fn, typename... Inputs>
  auto operator()(const std::string& name, Fn&& function, Inputs&&... inputs) const {
    const auto call = begin_call(name);
    if (!call) {
      return detail::call_function(function, inputs...);
    }
    const auto watched =
        [call, fn = std::decay_t<Fn>(std::forward<Fn>(function))](auto&... each) mutable {
          const detail::PartRun run(*call);
          return detail::call_function(fn, each...);
        };
    return checkpoint(options_, watched, std::forward<Inputs>(inputs)...);
  }

  /// For BatchSizerOptions::ladder.
  std::shared_ptr<ladder::Modules> modules() const;

 private:
  class Parts;
  /// Null where it is not recomputed, or inside another part.
  std::shared_ptr<detail::PartCall> begin_call(const std::string& name) const;

  CheckpointOptions options_;
  std::shared_ptr<Parts> parts_;
};

}  // namespace brimful
