#pragma once

namespace sim {

/// As cudnnGetVersion says it: 91900 is 9.19.0.
int cudnn_version();

}  // namespace sim
