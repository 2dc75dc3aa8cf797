brimful_sources(HEAVY
  break_group.cpp
  collective_call.cpp
  collective_tape.cpp
  noted_calls.cpp
  sharded_model.cpp
  sharded_state.cpp)
