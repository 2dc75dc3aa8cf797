#pragma once
#include <brimful/reducer/reducer.h>

#include <exception>

#include "reducer/engine.h"
#include "reducer/loop_driver.h"

namespace brimful {

struct Reducer::State {
  State(const Group& group, const ReducerOptions& options) : engine(group), loop(engine, options) {}

  Engine engine;
  LoopDriver loop;
  int exceptions = std::uncaught_exceptions();  ///< on their way when the reducer was made
};

}  // namespace brimful
