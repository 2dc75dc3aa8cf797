"""A fault on any ranks at any point of a step, in processes with budgets and random numbers of their own."""

import itertools
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from forked_scripts import run_forked_script
from models import (
    classes,
    cross_entropy,
    dropout_net,
    noisy_cross_entropy,
    rng_states,
    same_bits,
    seed,
    values_of,
    wrap,
)
from rank_processes import raised, run_script

import brimful

STEPS = 3
PARAMETERS = len(list(dropout_net().parameters()))
SOON_S = 2.0


def subsets(ranks):
    counts = range(1, len(ranks) + 1)
    return [chosen for count in counts for chosen in itertools.combinations(ranks, count)]


@dataclass(frozen=True)
class Fault:
    """`point`: "forward", "end" (after the last gradient), or the number of the gradient hook of the step."""

    ranks: tuple[int, ...]
    point: str | int
    kind: str  # "budget" (a real shortage), "memory" (raised) or "error"
    step: int = 1


class Planter:
    """Plants one fault, once, into the hooks of a model and its loss function."""

    def __init__(self, model, faults, rank, pieces=1):
        self.fault = next((fault for fault in faults if rank in fault.ranks), None)
        self.rank = rank
        self.step = 0
        self.fired = False
        self.hooks = 0
        self.last_backward = (pieces - 1) * PARAMETERS
        self.handles = [p.register_hook(self.on_gradient) for p in model.parameters()]
        self.handles.append(model.module[3].register_forward_pre_hook(self.in_forward))

    def fire(self):
        self.fired = True
        if self.fault.kind == "budget":
            brimful.memory.set_limit("cpu", brimful.memory.stats("cpu").used_bytes)
        elif self.fault.kind == "memory":
            raise torch.OutOfMemoryError(f"planted shortage on rank {self.rank}")
        else:
            raise ValueError(f"planted error on rank {self.rank}")

    def due(self, point):
        fault = self.fault
        return fault and not self.fired and self.step == fault.step and fault.point == point

    def in_forward(self, *_):
        if self.due("forward"):
            self.fire()

    def on_gradient(self, gradient):
        if self.hooks == self.last_backward and self.due("end"):
            torch.autograd.Variable._execution_engine.queue_callback(self.at_end)
        number = self.hooks
        self.hooks += 1
        if self.due(number):
            self.fire()

    def at_end(self):
        self.fire()
        torch.empty(1000)  # refused under a budget

    def loss(self, model, piece):
        self.lift()
        return noisy_cross_entropy(model, piece)

    def next_step(self):
        self.lift()
        self.step += 1
        self.hooks = 0

    def lift(self):
        brimful.memory.set_limit("cpu", None)

    def remove(self):
        for handle in self.handles:
            handle.remove()


def train(rank, model, initial, *faults, splits=None, pieces=1, absent=()):
    """Three steps on uneven batches; what they ended with. Continues behind a step that failed.

    The ranks in `absent` have no data in the second step.
    """
    model.module.load_state_dict(initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sizer = brimful.BatchSizer(model, optimizer, pieces=pieces)
    seed(rank.index)
    planter = Planter(model, faults, rank.index, pieces)
    outcomes, errors = [], {}
    for step in range(STEPS):
        batch = classes(8 + 3 * rank.index, seed=10 * step + rank.index)
        if step == 1 and rank.index in absent:
            batch = brimful.NO_DATA
        before = values_of(model), rng_states()

        def one_step(batch=batch, step=step):
            split = None if splits is None else splits[step] or None
            outcomes.append(sizer.step(batch, planter.loss, split=split))

        error = raised(one_step)
        planter.next_step()
        if error is None:
            optimizer.step()
        else:
            after = values_of(model), rng_states()
            assert same_bits(after[0], before[0]) and after[1] == before[1], faults
            errors[step] = error
        optimizer.zero_grad()
    planter.remove()
    return {
        "values": values_of(model),
        "rng": rng_states(),
        "splits": [outcome.split for outcome in outcomes],
        "retries": [outcome.retries for outcome in outcomes],
        "losses": [outcome.loss for outcome in outcomes],
        "attempts": [o.attempts for o in outcomes],
        "errors": errors,
        "fired": planter.fired,
    }


def require_equal_replicas(values, about):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, values)
    for other in everybody:
        assert same_bits(values, other), about


def memory_faults_job(rank, kinds, points, pieces, absent=()):
    """Counts what happened over all faults, of this rank."""
    count = Counter()
    model = wrap(dropout_net())
    initial = values_of(model)
    present = [r for r in range(rank.size) if r not in absent]
    for kind, point, chosen in itertools.product(kinds, points, subsets(present)):
        fault = Fault(chosen, point, kind)
        run = train(rank, model, initial, fault, pieces=pieces, absent=absent)
        assert not run["errors"], (fault, run["errors"])
        require_equal_replicas(run["values"], fault)
        replay = train(rank, model, initial, splits=run["splits"], pieces=pieces, absent=absent)
        assert replay["retries"] == [0] * STEPS, fault
        assert same_bits(run["values"], replay["values"]), fault
        assert run["rng"] == replay["rng"], fault
        assert run["losses"] == replay["losses"], fault
        short = [attempt for attempt in run["attempts"][1] if attempt.ran_out]
        mine = [attempt for attempt in short if rank.index in attempt.ran_out]
        assert run["fired"] == (rank.index in chosen), fault
        if kind == "memory":
            assert len(mine) == (rank.index in chosen and point != "end"), fault
        if point == "forward":
            assert len(short) == (rank.index in chosen), fault  # who ran out did so alone
        count["alone"] += sum(attempt.alone for attempt in mine)
        count["together"] += sum(not attempt.alone for attempt in short)
        count["after a bucket was launched"] += sum(
            attempt.buckets_launched > 0 for attempt in mine
        )
        count["stood"] += not short
    return count


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("kind", ["memory", "budget"])
def test_memory_that_runs_out_anywhere_on_any_ranks_leaves_no_trace(ranks_over, kind, pieces):
    points = ["forward", *range(pieces * PARAMETERS), "end"]
    for count in ranks_over(memory_faults_job, [kind], points, pieces, watchdog_s=60):
        assert count["alone"] >= 2 * pieces
        assert count["together"] >= count["after a bucket was launched"] >= 2
        assert count["stood"] >= 3


def test_three_ranks_survive_a_shortage_on_any_of_them(ranks_over_each):
    points = ["forward", 0, PARAMETERS // 2, PARAMETERS - 1, "end"]
    ranks_over_each(memory_faults_job, ["memory", "budget"], points, 1, size=3, watchdog_s=60)


def test_a_shortage_while_another_rank_has_no_data_leaves_no_trace(ranks_over_each):
    points = ["forward", *range(PARAMETERS), "end"]
    ranks_over_each(memory_faults_job, ["memory", "budget"], points, 1, (0,), watchdog_s=60)
    ranks_over_each(memory_faults_job, ["memory"], points, 1, (1,), watchdog_s=60)


def require_failure(error, failed, text, about):
    assert type(error) is brimful.RankFailed, (about, error)
    assert (error.rank, error.kind) == (failed, "error"), about
    assert f"rank {failed}: ValueError: {text}" in str(error), (about, str(error))
    assert error.seconds < SOON_S, about


def errors_job(rank, points, absent=()):
    model = wrap(dropout_net())
    initial = values_of(model)
    present = [r for r in range(rank.size) if r not in absent]
    for point, chosen in itertools.product(points, subsets(present)):
        fault = Fault(chosen, point, "error")
        run = train(rank, model, initial, fault, absent=absent)
        assert list(run["errors"]) == [1], (fault, run["errors"])
        error = run["errors"][1]
        if rank.index in chosen:
            assert type(error) is ValueError, (fault, error)
            assert str(error) == f"planted error on rank {rank.index}"
        else:
            require_failure(error, chosen[0], f"planted error on rank {chosen[0]}", fault)
        assert len(run["losses"]) == STEPS - 1
        require_equal_replicas(run["values"], fault)


@pytest.mark.parametrize("size", [2, 3])
def test_an_exception_anywhere_on_any_ranks_raises_on_all_and_the_next_step_works(ranks_over, size):
    points = ["forward", *range(PARAMETERS), "end"]
    ranks_over(errors_job, points, size=size, watchdog_s=40)


def test_an_exception_reaches_a_rank_without_data(ranks_over_each):
    ranks_over_each(errors_job, ["forward", *range(PARAMETERS), "end"], (0,))


def shortage_beside_error_job(rank):
    model = wrap(dropout_net())
    initial = values_of(model)
    points = ["forward", 0, PARAMETERS - 1, "end"]
    for first, second in itertools.product(points, points):
        faults = Fault((0,), first, "memory"), Fault((1,), second, "error")
        run = train(rank, model, initial, *faults)
        error = run["errors"][1]
        if rank.index == 0:
            require_failure(error, 1, "planted error on rank 1", faults)
        else:
            assert type(error) is ValueError, faults
        require_equal_replicas(run["values"], faults)


def test_an_exception_beside_a_shortage_of_another_rank_fails_the_step(ranks_over_each):
    ranks_over_each(shortage_beside_error_job)


def plain_job(rank, kinds, points, scope):
    model = wrap(dropout_net())
    initial = values_of(model)
    raised_count = 0
    for kind, point, chosen in itertools.product(kinds, points, subsets(range(rank.size))):
        fault = Fault(chosen, point, kind)
        model.module.load_state_dict(initial)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        planter = Planter(model, [fault], rank.index)
        errors = {}
        for step in range(STEPS):
            batch = classes(8, seed=10 * step + rank.index)

            def one_step(batch=batch, planter=planter):
                with model.step() if scope else nullcontext():
                    planter.loss(model, batch).backward()

            errors[step] = raised(one_step)
            planter.next_step()
            if errors[step] is None:
                optimizer.step()
            optimizer.zero_grad()
        planter.remove()
        assert errors[0] is None and errors[2] is None, (fault, errors)
        require_plain_error(rank, fault, scope, errors[1])
        raised_count += errors[1] is not None
        require_equal_replicas(
            {n: v for n, v in values_of(model).items() if n != "1.num_batches_tracked"}, fault
        )
    return raised_count


def require_plain_error(rank, fault, scope, error):
    everybody = [None] * rank.size
    dist.all_gather_object(everybody, None if error is None else type(error).__name__)
    assert all(everybody) or (fault.kind == "budget" and not any(everybody)), (fault, everybody)
    if error is None:
        return
    if rank.index in fault.ranks:
        own = ValueError if fault.kind == "error" else torch.OutOfMemoryError
        assert isinstance(error, own) and not isinstance(error, brimful.RankFailed), fault
        return
    assert isinstance(error, brimful.RankFailed), (fault, error)
    assert error.rank == fault.ranks[0], (fault, error)
    assert f" failed on rank {error.rank}: " in str(error), (fault, error)
    assert error.seconds < SOON_S, (fault, error.seconds)
    in_forward = fault.point == "forward"
    known = scope or (fault.kind == "budget" and not in_forward)  # its kind is seen or reported
    if fault.kind != "error" and known:
        assert type(error) is brimful.RankOutOfMemory, (fault, error)
        assert isinstance(error, torch.OutOfMemoryError)
    if scope and fault.kind != "budget":
        assert f"planted {'error' if fault.kind == 'error' else 'shortage'}" in str(error), fault


@pytest.mark.parametrize("scope", [True, False])
def test_in_a_plain_loop_a_fault_raises_on_all_ranks_and_the_next_step_works(ranks_over, scope):
    points = ["forward", *range(PARAMETERS)]
    kinds = ["memory", "budget", "error"]
    for count in ranks_over(plain_job, kinds, points, scope, watchdog_s=60):
        assert count > 2 * 3 * len(points)


def late_error_job(rank):
    """The error comes after the collectives of its step, too late to be reported in it."""
    model = wrap(dropout_net())
    errors = []
    for step in range(4):

        def one_step(step=step):
            with model.step():
                cross_entropy(model, classes(8, seed=step)).backward()
                if rank.index == 1 and step == 1:
                    raise ValueError("planted behind backward")

        errors.append(raised(one_step))
        model.zero_grad()
    return errors


def test_in_a_plain_loop_an_error_behind_backward_is_reported_in_the_next_step(ranks_over_each):
    healthy, failed = ranks_over_each(late_error_job)
    assert healthy[0] is failed[0] is healthy[1] is None
    assert type(failed[1]) is ValueError
    for error in (healthy[2], failed[2]):
        assert type(error) is brimful.RankFailed and error.rank == 1
        assert "planted behind backward" in str(error)
    assert healthy[3] is failed[3] is None


def half_step_job(rank, in_loop):
    model = wrap(dropout_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizer = brimful.BatchSizer(model, optimizer)
    data = [classes(4, seed=step) for step in range(4)]
    log = []

    def loop():
        for number, batch in enumerate(sizer.batches(data) if in_loop else data):
            log.append(number)
            sizer.step(batch, cross_entropy)
            if rank.index == 1 and number == 1:
                optimizer.param_groups[0]["lr"] = "broken"
            optimizer.step()
            optimizer.zero_grad()

    return raised(loop), log


@pytest.mark.parametrize("in_loop", [True, False])
def test_an_error_inside_the_optimizer_is_reported_in_the_next_step_and_never_repeated(
    ranks_over_each, in_loop
):
    (healthy, _), (failed, log) = ranks_over_each(half_step_job, in_loop)
    assert type(failed) is brimful.HalfStepError, failed
    assert "the optimizer failed in the middle of its step" in str(failed)
    assert log == [0, 1]
    assert type(healthy) is brimful.RankFailed and healthy.rank == 1
    assert "the optimizer failed in the middle of its step" in str(healthy)
    assert healthy.seconds < 2 * SOON_S


SCRIPT = """
import sys, time
from models import classes, cross_entropy, dropout_net, wrap
from rank_processes import join_group
import brimful

rank, port, way = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
join_group(rank, 2, port, 15)
model = wrap(dropout_net())


def die(*_):
    if way == "exit":
        sys.exit(0)
    raise ValueError("planted and uncaught")


for step in range(3):
    if rank == 1 and step == 1:
        if way == "hook":
            next(model.parameters()).register_hook(die)
        else:
            model.module[0].register_forward_hook(die)
    start = time.monotonic()
    try:
        cross_entropy(model, classes(8, seed=step)).backward()
    except brimful.RankFailed as error:
        print(f"step {step}, rank {error.rank}, {error}")
        assert time.monotonic() - start < 3
        sys.exit(0)
    model.zero_grad()
"""


@pytest.mark.parametrize("way", ["hook", "forward", "exit"])
def test_a_rank_that_ends_in_the_middle_of_a_step_is_noticed(way):
    # One through an interpreter's own end; forks do the same at theirs.
    run = run_script if way == "exit" else run_forked_script
    (healthy, heard), (failed, printed) = run(SCRIPT, way)
    assert failed == (0 if way == "exit" else 1), printed
    assert healthy == 0, heard
    assert "step 1, rank 1, " in heard
    words = "ended in the middle of a step" if way == "exit" else "ValueError: planted and uncaught"
    assert words in heard


def test_the_errors_are_of_types_that_callers_know():
    assert issubclass(brimful.RankOutOfMemory, brimful.RankFailed)
    assert issubclass(brimful.RankOutOfMemory, torch.OutOfMemoryError)
    assert issubclass(brimful.BatchTooLarge, torch.OutOfMemoryError)
    assert issubclass(brimful.RankFailed, RuntimeError)
    assert issubclass(brimful.PlanMismatch, ValueError)
