#pragma once
#include <brimful/pipeline/schedule.h>

namespace brimful::pipeline {

// A rank's actions in schedules over a V: it has the stages `rank` and 2 * ranks - 1 - rank.

std::vector<Action> zbv_rank(int rank, int ranks, int microbatches);
std::vector<Action> dualpipev_rank(int rank, int ranks, int microbatches);

}  // namespace brimful::pipeline
