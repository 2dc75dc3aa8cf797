#pragma once
#include <brimful/export.h>
#include <brimful/probes/oom_report.h>

#include <optional>

namespace brimful::probes {

/// Asked within a refusal, by the thread whose request was refused; not in attempts that are retried.
using OomProgramReader = std::optional<OomProgram> (*)();
BRIMFUL_API void set_oom_program_reader(OomProgramReader reader) noexcept;

}  // namespace brimful::probes
