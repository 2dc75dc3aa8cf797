#pragma once
#include <brimful/reducer/reducer.h>

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "reducer/engine.h"
#include "reducer/loop_driver.h"

namespace brimful {

/// All that belongs to a group: a reducer that regroups gets another one. Hooks hold it weakly.
struct Reducer::State {
  State(const Group& group, const ReducerOptions& given)
      : engine(group), loop(engine, given), options(given) {}
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  /// A collective. The state has no hooks yet.
  static std::shared_ptr<State> make(std::vector<at::Tensor> parameters,
                                     std::vector<at::Tensor> buffers, const Group& group,
                                     const ReducerOptions& options);
  /// Adds the hooks, and registers the state as its parameters' owner.
  static void connect(const std::shared_ptr<State>& state);
  static void own_parameters(const std::shared_ptr<State>& state);
  /// Of the communication hook's name. A collective.
  void require_same_hook(const std::string& name) const;
  /// Undoes connect().
  void let_go();

  Engine engine;
  LoopDriver loop;
  ReducerOptions options;
  std::string hook;                 ///< the communication hook's name
  std::vector<at::Tensor> buffers;  ///< those that a forward put in others' place among them
  bool connected = false;
  int exceptions = std::uncaught_exceptions();  ///< on their way when the reducer was made
};

}  // namespace brimful
