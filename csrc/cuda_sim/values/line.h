#pragma once
#include <string>

namespace sim_values {

/// The innermost line of Python at work in this thread that is not torch's own, as "train.py:12"; "?" without Python.
std::string line_of_python();

}  // namespace sim_values
