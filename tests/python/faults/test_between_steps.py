"""An exception between two steps of one rank: in the loader, in the loop's body, swallowed or not."""

import pytest
import torch
import torch.distributed as dist
from forked_scripts import run_forked_script
from models import classes, cross_entropy, dropout_net, same_bits, values_of, wrap
from rank_processes import raised, run_script

import brimful

SOON_S = 2.0


def caught_job(rank, size):
    """Rank 1 leaves its loop by an error that its caller catches, and begins another loop; so do the others."""
    model = wrap(dropout_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizer = brimful.BatchSizer(model, optimizer)

    def epoch(faulty):
        steps = 0
        for batch in sizer.batches([classes(8, seed=s + rank.index) for s in range(4)]):
            sizer.step(batch, cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if faulty and steps == 2:
                raise OSError("planted between two steps")
        return steps

    first = raised(epoch, rank.index == 1)
    model.zero_grad()
    second = raised(epoch, False)
    return first, second, values_of(model)


@pytest.mark.parametrize("size", [2, 4])
def test_a_loop_that_one_rank_left_raises_on_the_others_and_the_next_loop_works(ranks, size):
    results = ranks(caught_job, size, size=size, timeout_s=5)
    for rank, (first, second, values) in enumerate(results):
        if rank == 1:
            assert type(first) is OSError
        else:
            assert type(first) is brimful.RankFailed and first.rank == 1, first
            assert "left its loop over data and began another one" in str(first)
            assert first.seconds < SOON_S
        assert second is None, second
        assert same_bits(values, results[0][2])


def left_by_all_job(rank):
    model = wrap(dropout_net())
    sizer = brimful.BatchSizer(model)
    for _ in range(3):
        for number, batch in enumerate(sizer.batches([classes(8, seed=s) for s in range(4)])):
            sizer.step(batch, cross_entropy)
            model.zero_grad()
            if number == 1:
                break
    return sizer.state_dict()["steps"]


def test_a_loop_that_all_ranks_left_together_is_no_failure(ranks):
    assert ranks(left_by_all_job) == [6, 6]


SCRIPT = """
import sys
from models import classes, cross_entropy, dropout_net, wrap
from rank_processes import join_group
import torch
import brimful

rank, port, way, place = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
join_group(rank, 2, port, 10)
model = wrap(dropout_net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sizer = brimful.BatchSizer(model, optimizer) if way == "sizer" else None


def data():
    for step in range(4):
        if rank == 1 and step == 2 and place == "loader":
            raise OSError("planted in the loader")
        yield classes(8, seed=step)


def fail_in_optimizer():
    if rank == 1 and place == "optimizer":
        optimizer.param_groups[0]["lr"] = "planted in the optimizer"
    if rank == 1 and place == "body":
        raise OSError("planted in the body")


def loop():
    if way == "sizer":
        for number, batch in enumerate(sizer.batches(data())):
            sizer.step(batch, cross_entropy)
            if number == 1:
                fail_in_optimizer()
            optimizer.step()
            optimizer.zero_grad()
        return
    for number, batch in enumerate(data()):
        cross_entropy(model, batch).backward()
        if number == 1:
            fail_in_optimizer()
        optimizer.step()
        optimizer.zero_grad()


try:
    loop()
except brimful.RankFailed as error:
    print(f"heard: {type(error).__name__}, rank {error.rank}, {error}")
    sys.exit(7)
except Exception as error:
    if place == "body" and way == "sizer" and sys.argv[5] == "exits":
        sys.exit(3)
    raise
"""


@pytest.mark.parametrize("way", ["sizer", "plain"])
@pytest.mark.parametrize("place", ["loader", "optimizer", "body"])
def test_an_uncaught_error_between_steps_arrives_with_its_message(way, place):
    # One through an interpreter's own end; forks do the same at theirs.
    run = run_script if (way, place) == ("plain", "body") else run_forked_script
    (status, heard), (failed, printed) = run(SCRIPT, way, place, "raises")
    assert failed == 1, printed
    assert status == 7, heard
    step = 1 if (way, place) == ("sizer", "loader") else 2  # a sizer looks one batch ahead
    assert f"rank 1, step {step} failed on rank 1: " in heard, heard
    words = "TypeError: " if place == "optimizer" else f"OSError: planted in the {place}"
    assert words in heard, heard


def test_a_process_that_ends_between_steps_of_a_loop_is_noticed():
    (status, heard), (failed, printed) = run_script(SCRIPT, "sizer", "body", "exits")
    assert failed == 3, printed
    assert status == 7, heard
    assert "rank 1 failed: its process ended between two steps" in heard, heard


PLACES = {
    "sizer": ["before step", "before optimizer", "before zero_grad", "after"],
    "scope": ["before step", "before backward", "before optimizer", "in optimizer", "after"],
    "plain": ["before optimizer", "in optimizer", "before zero_grad", "after"],
}
INTERRUPTED = 2  # step


class Loop:
    """A training loop that an interrupt leaves in one place of one step, and whose program goes on with the next."""

    def __init__(self, rank, way, place, at, optimizer_of):
        self.model = wrap(dropout_net())
        first, second = list(self.model.parameters())[:2], list(self.model.parameters())[2:]
        # Two optimizers: an interrupt in their middle leaves parameters half updated.
        self.optimizers = [optimizer_of(first), optimizer_of(second)]
        self.sizer = brimful.BatchSizer(self.model, self.optimizers) if way == "sizer" else None
        self.rank, self.way = rank.index, way
        self.place = place if rank.index == at else None

    def reach(self, place, step):
        if place == self.place and step == INTERRUPTED:
            self.place = None
            raise KeyboardInterrupt

    def run(self, step):
        self.reach("before step", step)
        batch = classes(8, seed=10 * step + self.rank)
        if self.way == "sizer":
            self.sizer.step(batch, cross_entropy)
            self.update(step)
            self.reach("before zero_grad", step)
        elif self.way == "scope":
            with self.model.step():
                loss = cross_entropy(self.model, batch)
                self.reach("before backward", step)
                loss.backward()
                self.update(step)
        else:
            cross_entropy(self.model, batch).backward()
            self.update(step)
            self.reach("before zero_grad", step)
        self.model.zero_grad()
        self.reach("after", step)

    def update(self, step):
        self.reach("before optimizer", step)
        self.optimizers[0].step()
        self.reach("in optimizer", step)
        self.optimizers[1].step()

    def values(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def take_rank_0s(self):
        states = [v for o in self.optimizers for s in o.state.values() for v in s.values()]
        for tensor in [*self.model.parameters(), *self.model.buffers(), *states]:
            if isinstance(tensor, torch.Tensor):
                dist.broadcast(tensor.data, 0)


def interrupted_job(rank, way, optimizer_of):
    """For each place and rank: the steps that stood with the parameters that they had, and the errors."""
    found = {}
    for place in PLACES[way]:
        for at in range(rank.size):
            loop = Loop(rank, way, place, at, optimizer_of)
            stood, errors = {}, []
            for step in range(7):
                values = loop.values()
                try:
                    try:
                        loop.run(step)
                    except KeyboardInterrupt:
                        if place != "before step":
                            continue
                        loop.run(step)  # else it is a step behind the others
                    stood[step] = values
                except Exception as error:
                    errors.append((type(error), str(error)))
                    loop.model.zero_grad()
            if any(kind is brimful.PlanMismatch for kind, _ in errors):
                loop.take_rank_0s()
                for step in (7, 8):
                    stood[step] = loop.values()
                    loop.run(step)
            found[place, at] = stood, errors
    return found


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def fused_adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, fused=True)


@pytest.mark.parametrize(
    ("way", "optimizer_of"), [("sizer", sgd), ("scope", fused_adam), ("plain", sgd)]
)
def test_no_step_stands_on_ranks_that_an_interrupt_has_made_differ(ranks, way, optimizer_of):
    mine, theirs = ranks(interrupted_job, way, optimizer_of, watchdog_s=60)
    for (place, at), (stood, errors) in mine.items():
        about = f"{place} on rank {at}: {errors} and {theirs[place, at][1]}"
        both = stood.keys() & theirs[place, at][0].keys()
        assert {0, 1} < both and (8 in both or 6 in both), about
        for step in both:
            same = same_bits(stood[step], theirs[place, at][0][step])
            assert same, f"step {step} stood on ranks with other parameters, {about}"
        differ = place in ("before optimizer", "in optimizer")
        for kind, _ in errors + theirs[place, at][1]:
            assert issubclass(kind, (ValueError, brimful.RankFailed)), about
        for seen in (errors, theirs[place, at][1]):
            words = [words for kind, words in seen if kind is brimful.PlanMismatch]
            assert bool(words) == differ, about
            if place == "before optimizer":
                who = f"rank {1 - at} updated them after the step before, and rank {at} did not"
                assert all(who in line for line in words), about
            elif differ:
                assert all("updated different parameters" in line for line in words), about
            assert all("load a checkpoint on every rank, or give" in line for line in words), about


def drifting_job(rank):
    """Sizers whose gradients would stay on each rank, with and without a word that this is meant."""
    net, head = dropout_net(), torch.nn.Linear(3, 3)
    wrapped = wrap(dropout_net())
    alone = brimful.DistributedDataParallel(
        dropout_net(), process_group=[dist.new_group([r]) for r in range(rank.size)][rank.index]
    )
    partly = dropout_net()
    partly._ddp_params_and_buffers_to_ignore = ["5.weight", "5.bias"]
    refused = [
        raised(brimful.BatchSizer, net),
        raised(brimful.BatchSizer, [wrapped, head]),
        raised(brimful.BatchSizer, wrapped, torch.optim.SGD(head.parameters(), lr=0.1)),
    ]
    for model in (alone, wrap(partly)):
        brimful.BatchSizer(model)
    brimful.BatchSizer([wrapped, head], local=True)
    outcome = brimful.BatchSizer(net, local=True).step(classes(8), cross_entropy)
    return refused, outcome.weight


def test_gradients_that_would_stay_on_a_rank_are_refused_unless_that_is_meant(ranks):
    for refused, weight in ranks(drifting_job):
        for error, count in zip(refused, (8, 2, 2), strict=True):
            assert type(error) is ValueError
            assert f"(parameters in no wrapped module: {count}, ranks: 2)" in str(error), error
            assert "or pass local=True" in str(error)
        assert weight == 8


def broadcast_job(rank):
    """Rank 0 has the optimizer, and the others its parameters: no word of that, and nothing is exchanged for long."""
    model = wrap(dropout_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizer = brimful.BatchSizer(model)
    for step in range(5):
        sizer.step(classes(8, seed=10 * step + rank.index), cross_entropy)
        if rank.index == 0:
            optimizer.step()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        model.zero_grad()
    return values_of(model)


def test_parameters_that_one_rank_updates_and_gives_to_the_others_are_alike(ranks):
    first, second = ranks(broadcast_job)
    assert same_bits(first, second)
