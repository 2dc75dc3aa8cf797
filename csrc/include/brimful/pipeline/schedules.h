#pragma once
#include <brimful/pipeline/schedule.h>

namespace brimful::pipeline {

// Schedules without sends and receives (see with_communication()), for any `ranks` >= 1 and `microbatches` >= 1, fewer
// microbatches than ranks too. With several stages a rank, rank r has the stages r, r + ranks, r + 2 * ranks and so on;
// in a "V" rank r has the stages r and 2 * ranks - 1 - r. All throw c10::ValueError for numbers below 1 or too large to
// be meant.

/// All forwards, then all backwards (Huang et al., 2019), both from the first microbatch to the last. One stage a rank;
/// each holds all microbatches.
BRIMFUL_API Schedule gpipe(int ranks, int microbatches);

/// A backward as soon as there is one (PipeDream-Flush; Narayanan et al., 2021). Stage i holds min(microbatches, ranks
/// - i).
BRIMFUL_API Schedule one_forward_one_backward(int ranks, int microbatches);

/// 1F1B with several stages a rank, depth first (Megatron-LM; Narayanan et al., 2021). Microbatches go in rounds of at
/// least `ranks`, as equal as may be, the larger ones first.
BRIMFUL_API Schedule interleaved_1f1b(int ranks, int stages_per_rank, int microbatches);

/// All microbatches through a rank's first stage, then through its second, and so on; backwards in the reverse
/// order, the last stage and the last microbatch first (Lamy-Poirier, 2023).
BRIMFUL_API Schedule looped_bfs(int ranks, int stages_per_rank, int microbatches);

/// Backwards split into I and W, W filling the cool-down; no more live microbatches than 1F1B's first stage (ZB-H1; Qi
/// et al., 2023). With several stages a rank it is interleaved, as torch's InterleavedZeroBubble.
BRIMFUL_API Schedule zb_h1(int ranks, int stages_per_rank, int microbatches);

/// As ZB-H1, with twice the warm-up: no bubble where F = I = W, up to 2 * ranks - 1 live microbatches. One stage a
/// rank.
BRIMFUL_API Schedule zb_h2(int ranks, int microbatches);

/// Zero bubble over a V: no bubble where F = I = W, and 1F1B's memory. Two stages a rank.
BRIMFUL_API Schedule zbv(int ranks, int microbatches);

/// DualPipe's bidirectional order folded into a V (DeepSeek-V3, 2024), forwards and backwards that it overlaps one
/// after the other. Two stages a rank.
BRIMFUL_API Schedule dualpipev(int ranks, int microbatches);

/// Forwards alone, for inference; several stages a rank go in rounds as in interleaved_1f1b().
BRIMFUL_API Schedule forward_only(int ranks, int stages_per_rank, int microbatches);

/// The names that make_schedule() knows: those of the functions above, "1f1b" for one_forward_one_backward().
BRIMFUL_API std::vector<std::string> schedule_names();

/// One of the above by its name, or by that of torch.distributed.pipelining ("Interleaved1F1B", "InterleavedZeroBubble",
/// "ZBVZeroBubble", "ScheduleGPipe"); capitals do not matter.
/// @throws c10::ValueError for an unknown name (it lists the known ones), and where the schedule is not defined for
///         `stages_per_rank` (it says for which it is)
BRIMFUL_API Schedule make_schedule(std::string_view name, int ranks, int stages_per_rank,
                                   int microbatches);

}  // namespace brimful::pipeline
