"""What the control record costs of a clean step, and a hook of a parameter, in instructions."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import callgrind, common, intervals
from benchmarks.reducer import report
from benchmarks.reducer.report import Conditions, Request

IDS = ("reducer.control_record",)
PROGRAM = "brimful_bench_instructions"
BARE, OURS = "bare", "brimful"
MODES = (BARE, OURS, "torch", "torch_view")
QUICK_MODES = (BARE, OURS)
PARAMETERS = 800
WARM_UP_STEPS = 3
STEPS, QUICK_STEPS = 5, 1
CONTROL_RECORD = ("brimful::Tail::", "brimful::encode(", "brimful::decode(")
ON_GRADIENT = ("brimful::Engine::on_gradient(",)


def measure(request: Request, conditions: Conditions) -> Iterator[common.Figure]:
    """Yields the fraction; a count has no interval, and one round is enough."""
    steps = request.rounds(STEPS, QUICK_STEPS)
    conditions.update(
        model="400 x Linear(64, bias=True), in C++",
        batch_per_rank=8,
        world_size=1,
        backend="gloo",
        value="instructions of the control record / of a clean step, on the rank's thread",
        warm_up_rounds=WARM_UP_STEPS,
        steps=steps,
    )
    if request.ours is not None:
        raise report.Unmeasured("a C++ program: nothing can stand in our place")
    profiles = {}
    try:
        program = callgrind.find_program(PROGRAM)
        for mode in QUICK_MODES if request.quick else MODES:
            profiles[mode] = callgrind.profile(program, mode, str(WARM_UP_STEPS), str(steps))
    except callgrind.Unavailable as error:
        raise report.Unmeasured(str(error)) from None
    yield evaluate(profiles, steps, conditions)


def evaluate(profiles: dict[str, str], steps: int, conditions: Conditions) -> common.Figure:
    """Returns the figure of the modes' profiles."""
    step = {mode: callgrind.total(text) / steps for mode, text in profiles.items()}
    record = callgrind.inclusive(profiles[OURS], CONTROL_RECORD) / steps
    hooks = callgrind.inclusive(profiles[OURS], ON_GRADIENT) / steps
    if record == 0:
        raise report.Unmeasured(f"none of {', '.join(CONTROL_RECORD)} is in the profile")
    above = {m: (count - step[BARE]) / PARAMETERS for m, count in step.items() if m != BARE}
    conditions.update(
        step_instructions=step,
        control_record_instructions=record,
        on_gradient_instructions_per_parameter=hooks / PARAMETERS,
        instructions_above_bare_per_parameter=above,
    )
    print("\nreducer.control_record: instructions on the rank's thread")
    for mode, count in step.items():
        report.print_line(f"step, {mode}", f"{count:,.0f}")
    for mode, count in above.items():
        report.print_line(f"above bare, a parameter, {mode}", f"{count:,.0f}")
    report.print_line("on_gradient, a parameter", f"{hooks / PARAMETERS:,.0f}")
    report.print_line("control record, a step", f"{record:,.0f}")
    fraction = record / step[OURS]
    value = intervals.Interval(fraction, fraction, fraction)
    return report.figure_of("reducer.control_record", value, 1, conditions)
