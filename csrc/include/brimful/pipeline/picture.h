#pragma once
#include <brimful/pipeline/simulate.h>

namespace brimful::pipeline {

/// A line a rank, for a monospaced font: F, B, I and W with their microbatches, as wide as they take long; with several
/// stages a rank the stage stands before (`3F0`). Dots are idle time; each rank's share of it stands at the end. The
/// times take at most `columns` where that is not 0: cells too narrow for their text show their kind alone.
/// @throws c10::ValueError if `columns` is negative
BRIMFUL_API std::string to_picture_text(const Timeline& timeline, int columns = 0);

/// The same as an SVG document: a row a rank, colours by kind, darker for later stages of a rank, a time axis, each
/// rank's share of idle time, and a tooltip for each action.
BRIMFUL_API std::string to_picture_svg(const Timeline& timeline);

/// Several, one above the other on one time axis.
BRIMFUL_API std::string to_picture_svg(const std::vector<Timeline>& timelines);

}  // namespace brimful::pipeline
