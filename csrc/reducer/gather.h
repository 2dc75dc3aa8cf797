#pragma once
#include <brimful/step/control_record.h>

#include <cstdint>
#include <vector>

#include "reducer/engine.h"

namespace brimful {

/// Every rank's bytes, for `what`, between steps. A collective.
/// @throws RankFailed if the process group broke
std::vector<std::vector<uint8_t>> gather_bytes(Engine& engine, const std::vector<uint8_t>& own,
                                               const char* what);
std::vector<ControlRecord> exchange_records(Engine& engine, const ControlRecord& record);
/// As Participant's, of the attempt under way.
std::vector<at::Tensor> gather(Engine& engine, const at::Tensor& own);
void sum(Engine& engine, at::Tensor& tensor);

}  // namespace brimful
