brimful_sources(HEAVY
  collective_call.cpp
  collective_tape.cpp
  noted_calls.cpp
  sharded_model.cpp
  sharded_state.cpp)
