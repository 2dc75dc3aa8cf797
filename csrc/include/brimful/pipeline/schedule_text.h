#pragma once
#include <brimful/pipeline/schedule.h>

namespace brimful::pipeline {

/// "0F0", "2SEND_B11": stage, kind, microbatch, in the grammar of torch.distributed.pipelining. Kinds are F, B, I, W,
/// SEND_F, RECV_F, SEND_B and RECV_B.
BRIMFUL_API std::string to_string(const Action& action);

/// Reads what to_string() writes; blanks around it are allowed.
/// @throws c10::ValueError for anything else, torch's UNSHARD and the like among it
BRIMFUL_API Action parse_action(std::string_view text);

/// One line a rank, its actions separated by commas.
BRIMFUL_API std::string to_csv(const Schedule& schedule);

/// Reads what to_csv() and torch's schedules write, with or without sends and receives. Empty cells (idle time) are
/// skipped, as are empty lines at the end. `(0F0;1B0)OVERLAP_F_B` becomes its actions in their order. Torch's actions
/// of sharding and of waiting (UNSHARD, RESHARD, REDUCE_GRAD, WAIT_REDUCE_GRAD, WAIT_SEND_F, WAIT_SEND_B) are left out
/// and counted in Schedule::ignored. The largest stage and microbatch show how many there are. The result may be
/// invalid: see check().
/// @throws c10::ValueError for an action that cannot be read (with its line and cell), or if there is none
BRIMFUL_API Schedule from_csv(std::string_view text, std::string name = "csv");

}  // namespace brimful::pipeline
