"""sizer.batches: loops over uneven data that end on all ranks together."""

import copy
import gc
import random
import weakref

import numpy
import pytest
import torch
from models import (
    classes,
    cross_entropy,
    gradients_of,
    relative_difference,
    seed,
    wrap,
)
from rank_processes import raised

import brimful
from brimful import _C


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))


def data_of(rank, count):
    return [classes(3 + rank, seed=100 * rank + number) for number in range(count)]


def uneven_job(rank, counts):
    model = wrap(net())
    sizer = brimful.BatchSizer(model)
    data = [data_of(r, count) for r, count in enumerate(counts)]
    seen, last = [], []
    for step, batch in enumerate(sizer.batches(data[rank.index])):
        seen.append("none" if batch is brimful.NO_DATA else len(batch[1]))
        outcome = sizer.step(batch, cross_entropy)
        last.append(outcome.last)
        reference = net()
        parts = [d[step] for d in data if step < len(d)]
        total = sum(len(part[1]) for part in parts)
        loss = sum(cross_entropy(reference, part) * len(part[1]) for part in parts) / total
        loss.backward()
        assert outcome.weight == total
        assert abs(outcome.loss - loss.item()) < 1e-6
        assert relative_difference(gradients_of(model), gradients_of(reference)) < 1e-6
        model.zero_grad()
    counters = model.reducer.counters
    assert counters.exchanges == 1  # one a loop
    assert counters.launches == len(seen) * model.reducer.buckets
    assert counters.host_waits == len(seen)
    return seen, last


@pytest.mark.parametrize("counts", [[2, 4], [3, 0], [0, 2], [1, 1], [2, 0, 5]])
def test_uneven_data_ends_on_all_ranks_after_the_same_step(ranks, counts):
    steps = max(counts)
    results = ranks(uneven_job, counts, size=len(counts))
    for rank, (seen, last) in enumerate(results):
        assert seen == [3 + rank] * counts[rank] + ["none"] * (steps - counts[rank])
        assert last == [False] * (steps - 1) + [True]


def test_a_loop_without_data_on_any_rank_yields_nothing(ranks):
    assert ranks(uneven_job, [0, 0]) == [([], []), ([], [])]


def train(sizer, model, batch):
    outcome = sizer.step(batch, cross_entropy)
    model.zero_grad()
    return outcome


def single():
    module = net()
    return module, brimful.BatchSizer(module)


def two_epochs_job(rank):
    model = wrap(net())
    sizer = brimful.BatchSizer(model)
    return [
        [train(sizer, model, batch).last for batch in sizer.batches(data_of(rank.index, count))]
        for count in (2 + rank.index, 1, 2 - rank.index)
    ]


def test_a_sizer_serves_several_loops(ranks):
    expected = [[False, False, True], [True], [False, True]]
    assert ranks(two_epochs_job) == [expected, expected]


def test_a_batch_that_is_none_is_refused_and_not_taken_for_the_end():
    net = torch.nn.Linear(2, 1)
    sizer = brimful.BatchSizer(net)
    with pytest.raises((TypeError, ValueError), match="batch"):
        for batch in sizer.batches([None]):
            sizer.step(batch, lambda model, x: model(x).mean())


def test_a_batch_left_out_raises():
    model, sizer = single()
    stepped = []

    def loop():
        for batch in sizer.batches(data_of(0, 3)):
            if not stepped:
                stepped.append(train(sizer, model, batch))

    with pytest.raises(RuntimeError, match=r"a batch was left out \(steps: 1\); call sizer.step"):
        loop()


def loader_job(rank, bad_fetch, kind):
    model = wrap(net())
    sizer = brimful.BatchSizer(model)

    def loader():
        for number in range(3):
            if rank.index == 1 and number == bad_fetch:
                raise kind(f"planted in fetch {number}")
            yield classes(4, seed=number)
        if rank.index == 1 and bad_fetch == 3:
            raise kind("planted in fetch 3")

    stepped = []

    def loop():
        for batch in sizer.batches(loader()):
            stepped.append(sizer.step(batch, cross_entropy))
            model.zero_grad()

    error = raised(loop)
    again = [train(sizer, model, b).last for b in sizer.batches(data_of(rank.index, 2))]
    return error, len(stepped), again


@pytest.mark.parametrize("bad_fetch", [0, 1, 2, 3])
def test_a_loader_that_raises_on_one_rank_raises_on_all(ranks, bad_fetch):
    (healthy, steps, again), (failed, failed_steps, failed_again) = ranks(
        loader_job, bad_fetch, KeyError
    )
    assert type(failed) is KeyError
    assert type(healthy) is brimful.RankFailed
    assert healthy.rank == 1
    assert f"rank 1: KeyError: 'planted in fetch {bad_fetch}'" in str(healthy)
    assert healthy.seconds < 2
    assert steps == failed_steps == max(0, bad_fetch - 1)
    assert again == failed_again == [False, True]


def caught_inside_job(rank):
    """The loop goes on after a step that failed."""
    model = wrap(net())
    sizer = brimful.BatchSizer(model)
    log = []
    for number, batch in enumerate(sizer.batches(data_of(rank.index, 2 + rank.index))):

        def loss(model, piece, number=number):
            if rank.index == 0 and number in (0, 1):
                raise ValueError("planted")
            return cross_entropy(model, piece)

        error = raised(sizer.step, batch, loss)
        log.append(None if error is None else type(error).__name__)
        model.zero_grad()
    return log


def test_a_loop_goes_on_after_a_failed_step_that_the_caller_caught(ranks):
    assert ranks(caught_inside_job) == [
        ["ValueError", "ValueError", None],
        ["RankFailed", "RankFailed", None],
    ]


def last_fails_job(rank):
    sizer = brimful.BatchSizer(wrap(net()))

    def loss(model, piece):
        raise ValueError("planted")

    return [
        type(raised(sizer.step, batch, loss)).__name__
        for batch in sizer.batches(data_of(rank.index, 1))
    ]


def test_a_loop_ends_behind_its_last_step_though_it_failed(ranks):
    assert ranks(last_fails_job) == [["ValueError"]] * 2


def outside_job(rank):
    model = wrap(net())
    sizer = brimful.BatchSizer(model)
    outcomes = []
    for step in range(3):
        batch = brimful.NO_DATA if rank.index == 1 and step == 1 else classes(4, seed=rank.index)
        outcomes.append(sizer.step(batch, cross_entropy))
        model.zero_grad()
    return [(outcome.weight, outcome.last) for outcome in outcomes]


def test_steps_outside_a_loop_take_no_data_and_never_are_the_last(ranks):
    expected = [(8.0, False), (4.0, False), (8.0, False)]
    assert ranks(outside_job) == [expected, expected]


def early_exit_job(rank):
    model = wrap(net())
    sizer = brimful.BatchSizer(model)

    def loop():
        for batch in sizer.batches(data_of(rank.index, 4)):
            if rank.index == 1 and sizer.state_dict()["steps"] == 1:
                break
            train(sizer, model, batch)

    return raised(loop)


def test_a_loop_left_early_on_one_rank_ends_in_an_error_that_names_it(ranks):
    healthy, early = ranks(early_exit_job, timeout_s=2)
    assert early is None
    assert type(healthy) is brimful.RankFailed
    assert healthy.rank == 1 and "rank 1 did not come (it left its loop, died or hangs)" in str(
        healthy
    )
    assert healthy.seconds < 7


def test_the_state_counts_what_was_stepped_and_not_the_batch_ahead():
    model, sizer = single()
    fetched = []

    def loader():
        for number in range(5):
            fetched.append(number)
            yield classes(4, seed=number)

    for step, batch in enumerate(sizer.batches(loader())):
        assert len(fetched) == min(step + 2, 5)
        train(sizer, model, batch)
        assert sizer.state_dict()["consumed"] == step + 1
        if step == 2:
            break
    state = sizer.state_dict()
    resumed = brimful.BatchSizer(net())
    resumed.load_state_dict(copy.deepcopy(state))
    assert resumed.state_dict() == state
    assert state["steps"] == state["consumed"] == 3


def test_a_resumed_sizer_starts_with_the_size_that_fits():
    module = net()
    sizer = brimful.BatchSizer(module)
    asked = []

    def loss(model, piece):
        asked.append(len(piece[1]))
        if len(piece[1]) > 2:
            raise torch.OutOfMemoryError("planted")
        return cross_entropy(model, piece)

    assert sizer.step(classes(8), loss).retries == 2
    module.zero_grad()
    resumed = brimful.BatchSizer(module)
    resumed.load_state_dict(sizer.state_dict())
    asked.clear()
    assert resumed.step(classes(6), loss).retries == 0
    assert asked == [2, 2, 2]


@pytest.mark.parametrize(
    "state", [{}, {"steps": 1}, {"steps": 1, "piece_rows": -1, "last_total": 0}]
)
def test_a_state_that_is_none_is_refused(state):
    with pytest.raises(ValueError, match="state"):
        brimful.BatchSizer(net()).load_state_dict(state)


def several_steps_job(rank, counts):
    """Two steps a body, of a half of the batch each; the ranks' data end at different bodies."""
    model = wrap(net())
    sizer = brimful.BatchSizer(model)
    bodies, last = 0, []
    for batch in sizer.batches(data_of(rank.index, counts[rank.index])):
        bodies += 1
        assert bodies <= max(counts), "batches() goes on after the last batch"
        for half in range(2):
            rows = slice(half, None, 2)
            part = batch if batch is brimful.NO_DATA else tuple(of[rows] for of in batch)
            last.append(sizer.step(part, cross_entropy).last)
            model.zero_grad()
    return bodies, last[::2], last[1::2], sizer.state_dict()["consumed"]


@pytest.mark.parametrize("counts", [[3], [2, 4], [3, 0]])
def test_a_body_may_make_several_steps(ranks, counts):
    steps = max(counts)
    for rank, found in enumerate(ranks(several_steps_job, counts, size=len(counts))):
        last = [False] * (steps - 1) + [True]
        assert found == (steps, last, last, counts[rank])


def test_a_step_that_failed_is_made_again_in_the_same_body():
    model, sizer = single()
    log = []
    for batch in sizer.batches(data_of(0, 2)):
        assert len(log) < 4, "batches() goes on after the last batch"

        def loss(model, piece):
            if len(log) % 2 == 0:
                raise ValueError("planted")
            return cross_entropy(model, piece)

        for _ in range(2):
            log.append(raised(sizer.step, batch, loss))
        model.zero_grad()
    assert [error is None for error in log] == [False, True] * 2
    assert sizer.state_dict()["consumed"] == 2


def nested_job(rank, counts, inner_first):
    """A loop in the body of another one, which ends on all ranks together by itself."""
    model = wrap(net())
    sizer = brimful.BatchSizer(model)
    log = []
    outer = data_of(rank.index, counts[rank.index])

    def inner():
        for other in sizer.batches(data_of(10 + rank.index, 2 + rank.index)):
            train(sizer, model, other)
            log.append("inner")

    for batch in sizer.batches(outer):
        assert log.count("outer") < max(counts), "batches() goes on after the last batch"
        if inner_first:
            inner()
        train(sizer, model, batch)
        log.append("outer")
        if not inner_first:
            inner()
    again = [train(sizer, model, batch).last for batch in sizer.batches(outer)]
    return log, again


@pytest.mark.parametrize("inner_first", [False, True])
@pytest.mark.parametrize("counts", [[3], [2, 3]])
def test_a_loop_may_be_in_the_body_of_another_one(ranks, counts, inner_first):
    steps, inner = max(counts), 1 + len(counts)
    body = ["inner"] * inner + ["outer"] if inner_first else ["outer"] + ["inner"] * inner
    expected = body * steps, [False] * (steps - 1) + [True]
    assert ranks(nested_job, counts, inner_first, size=len(counts)) == [expected] * len(counts)


def left_inside_job(rank):
    """The inner loop is left by all ranks, and the outer one goes on."""
    model = wrap(net())
    sizer = brimful.BatchSizer(model)
    seen = 0
    for batch in sizer.batches(data_of(rank.index, 3)):
        for other in sizer.batches(data_of(rank.index, 4)):
            train(sizer, model, other)
            break
        train(sizer, model, batch)
        seen += 1
    return seen, sizer._loop, sizer._loops


def test_an_inner_loop_may_be_left(ranks):
    assert ranks(left_inside_job) == [(3, None, 0)] * 2


def test_a_batch_left_out_of_the_outer_loop_raises():
    model, sizer = single()

    def loop():
        for _ in sizer.batches(data_of(0, 2)):
            for other in sizer.batches(data_of(0, 2)):
                train(sizer, model, other)

    with pytest.raises(RuntimeError, match=r"a batch was left out"):
        loop()


class Stateful:
    """A loader that can be resumed, as torchdata's is: its state is how many batches it has given."""

    def __init__(self, count=5):
        self.count, self.given, self.asked = count, 0, 0

    def __iter__(self):
        for number in range(self.given, self.count):
            self.given = number + 1
            yield classes(4, seed=number)
        self.given = 0

    def state_dict(self):
        self.asked += 1
        return {"given": self.given, "of": [self.given]}

    def load_state_dict(self, state):
        self.given = state["given"]


def test_a_loaders_state_is_of_the_batch_in_the_body_and_not_of_the_one_ahead():
    model, sizer = single()
    loader, states = Stateful(), []
    for batch in sizer.batches(loader):
        train(sizer, model, batch)
        states.append(loader.state_dict())
    assert [state["given"] for state in states] == [1, 2, 3, 4, 5]
    assert [state["of"] for state in states] == [[1], [2], [3], [4], [5]]
    assert "state_dict" not in vars(loader) and loader.state_dict()["given"] == 0
    resumed = Stateful()
    resumed.load_state_dict(states[2])
    assert len(list(resumed)) == 2


def test_a_loader_that_was_left_has_the_state_of_its_last_body_until_it_goes_on():
    model, sizer = single()
    loader = Stateful()
    for number, batch in enumerate(sizer.batches(loader)):
        train(sizer, model, batch)
        if number == 2:
            break
    assert loader.state_dict()["given"] == 3
    rest = iter(loader)
    next(rest)
    assert loader.state_dict()["given"] == 5 and "state_dict" not in vars(loader)


def test_a_loader_at_which_the_ranks_stopped_goes_on_with_the_next_batch():
    model, sizer = single()
    loader, steps = Stateful(), 0
    try:
        for batch in sizer.batches(loader):
            steps += 1
            if steps == 2:
                brimful.request_stop()
            stopped = train(sizer, model, batch).stop
    finally:
        _C.clear_stop()
    assert stopped and steps == 2 and loader.state_dict()["given"] == 2


def test_a_loader_that_was_left_begins_again_with_a_state_of_its_own():
    model, sizer = single()
    loader = Stateful()
    for _ in range(2):
        for batch in sizer.batches(loader):
            train(sizer, model, batch)
            break
    assert loader.state_dict()["given"] == 3  # one ahead each time, which is where it goes on


def test_an_advisor_around_a_stateful_loader_leaves_its_state_right():
    model, sizer = single()
    loader = Stateful()
    for number, batch in enumerate(sizer.batches(brimful.LoaderAdvisor(loader))):
        train(sizer, model, batch)
        assert loader.state_dict()["given"] == number + 1


def random_loader(fetched):
    """Draws from every generator of the process."""
    for _ in range(4):
        rows = [[random.random(), float(numpy.random.rand()), float(torch.rand(()))]]
        fetched.append(rows[0])
        yield torch.tensor(rows * 4).repeat(1, 2), torch.randint(0, 3, (4,))


def test_random_numbers_of_the_loader_are_not_drawn_twice_by_a_retry():
    def run(faults):
        seed(5)
        module = net()
        seed(6)
        sizer = brimful.BatchSizer(module, pieces=2)
        fetched, drawn = [], []

        def loss(model, piece):
            drawn.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
            if faults and len(drawn) == 2:
                faults.pop()
                raise torch.OutOfMemoryError("planted")
            return cross_entropy(model, piece)

        for batch in sizer.batches(random_loader(fetched)):
            drawn.clear()
            module.zero_grad()
            sizer.step(batch, loss, split=[1, 1, 1, 1] if faults is None else None)
        return fetched

    assert len({tuple(rows) for rows in run([])}) == 4
    with_retry = run([1])
    assert len({tuple(rows) for rows in with_retry}) == 4
    assert with_retry == run(None)


class Job:
    """Everything that may refer to everything else."""

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.sizer = brimful.BatchSizer(model, self.optimizer, weight_fn=self.rows)

    def rows(self, batch):
        return len(batch[1])

    def run(self, data):
        for batch in self.sizer.batches(data):
            self.sizer.step(batch, cross_entropy)
            self.optimizer.step()
            self.optimizer.zero_grad()


def lifetime_job(rank, wrapped):
    job = Job(wrap(net()) if wrapped else net())
    job.run(data_of(rank.index, 2))
    alive = [
        weakref.ref(thing) for thing in (job, job.sizer, job.sizer._core, job.model, job.optimizer)
    ]
    del job
    gc.collect()
    return [type(ref()).__name__ for ref in alive if ref() is not None]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_sizer_dies_with_its_model_and_optimizer(ranks, wrapped):
    assert ranks(lifetime_job, wrapped, size=1) == [[]]


def kept_parts_job(rank):
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizer = brimful.BatchSizer(model, optimizer)
    sizer.step(classes(4), cross_entropy)
    model.zero_grad()
    left = weakref.ref(sizer)
    del sizer
    gc.collect()
    errors = []
    for step in range(2):  # plain steps; the optimizer fails in the second one
        errors.append(raised(lambda: cross_entropy(model, classes(4)).backward()))
        if step == 1:
            optimizer.param_groups[0]["lr"] = "none"
        errors.append(raised(optimizer.step))
        model.zero_grad()
    return left() is None, model.buckets_expected(), [type(error) for error in errors]


def test_a_model_and_an_optimizer_outlive_their_sizer(ranks):
    dead, expected, errors = ranks(kept_parts_job, size=1)[0]
    assert dead and expected
    assert errors[:3] == [type(None)] * 3
    assert issubclass(errors[3], TypeError)


def test_a_sizer_keeps_no_batch():
    _, sizer = single()
    batch = classes(4)
    sizer.step(batch, cross_entropy)
    left = weakref.ref(batch[0])
    del batch
    gc.collect()
    assert left() is None
