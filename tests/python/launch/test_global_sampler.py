"""Ranks that take as many rows of a global batch as they are fast."""

import itertools
import math
import multiprocessing
import statistics
import time

import pytest
import torch
import torch.distributed as dist
from models import classes, cross_entropy, values_of, wrap
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import brimful

BATCH = 96
MS_PER_ROW = 0.2


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class Numbered(torch.utils.data.Dataset):
    """Rows that know their number."""

    def __init__(self, size):
        self.x, self.y = classes(size, dtype=torch.float64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


def with_workers(workers):
    """Options of a loader in a rank, which is a daemon and would start a server to fork from."""
    multiprocessing.current_process()._config["daemon"] = False
    return {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}


class Trainer:
    """A rank whose work takes `slowness` times as long for each row."""

    def __init__(self, data, slowness=0.0, workers=0, **options):
        self.slowness = slowness
        self.model = wrap(net())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.sizer = brimful.BatchSizer(self.model, self.optimizer)
        options = {"batch_size": BATCH, "lag": 2 * workers + 2, **options}
        self.sampler = brimful.GlobalSampler(data, **options)
        self.loader = DataLoader(data, batch_sampler=self.sampler, **with_workers(workers))
        self.ids = []  # by step

    def loss(self, model, piece):
        time.sleep(1e-3 * MS_PER_ROW * self.slowness * len(piece[0]))
        return cross_entropy(model, piece)

    def steps(self, most=math.inf):
        """Yields the outcome of each step, before the optimizer's."""
        for batch in self.sizer.batches(self.loader):
            self.ids.append([] if batch is brimful.NO_DATA else batch[2].tolist())
            yield self.sizer.step(batch, self.loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if len(self.ids) >= most:
                return

    def run(self, most=math.inf):
        for _ in self.steps(most):
            pass


def train_beside_a_slow_rank(here, workers):
    trainer = Trainer(Numbered(BATCH * 20 + 1), (2.0, 4.0)[here.index], workers)
    trainer.run()
    return trainer.ids, len(trainer.sampler), trainer.sampler.epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_half_as_fast_comes_to_a_third_of_the_rows(ranks, workers):
    (fast, fast_batches, epoch), (slow, slow_batches, _) = ranks(train_beside_a_slow_rank, workers)
    lag = 2 * workers + 2
    assert epoch == 1
    assert len(fast) == len(slow) == fast_batches == slow_batches + 1 == 21
    assert (
        len(fast[-1]) == 1 and slow[-1] == []
    )  # fewer rows than ranks: the last rank had no batch
    assert [len(ids) for ids in fast[: lag + 2]] == [48] * (lag + 2)
    for mine, others in zip(fast[lag + 5 : -1], slow[lag + 5 : -1], strict=True):
        assert len(mine) + len(others) == BATCH
    # Of most steps: this machine's other work makes single ones slow.
    assert 58 <= statistics.median(len(ids) for ids in fast[lag + 5 : -1]) <= 70
    every = [row for ids in fast + slow for row in ids]
    assert sorted(every) == list(range(BATCH * 20 + 1))


def gradients_of_uneven_shares(here):
    trainer = Trainer(Numbered(BATCH * 9 + 5), (1.0, 4.0)[here.index], seed=5)
    found = []
    for outcome in trainer.steps():
        gradients = [p.grad.clone() for p in trainer.model.module.parameters()]
        found.append((outcome.loss, outcome.weight, gradients))
    return trainer.ids, found, values_of(trainer.model)


def test_the_gradient_is_that_of_one_process_with_the_whole_batch(ranks):
    (mine, found, values), (others, _, _) = ranks(gradients_of_uneven_shares)
    assert len(mine[-2]) > 57
    data = Numbered(BATCH * 9 + 5)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = list(brimful.GlobalSampler(data, batch_size=BATCH, seed=5, lag=100))
    assert len(whole) == len(found)
    for step, (rows, (loss, weight, gradients)) in enumerate(zip(whole, found, strict=True)):
        assert mine[step] + others[step] == rows
        expected = cross_entropy(model, (data.x[rows], data.y[rows]))
        expected.backward()
        assert abs(loss - expected.item()) < 1e-12 and weight == len(rows)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert (parameter.grad - gradient).abs().max() < 1e-12
        optimizer.step()
        optimizer.zero_grad()
    for name, value in values_of(model).items():
        assert (value - values[name]).abs().max() < 1e-12


def train_in_two_parts(here, workers, at):
    data = Numbered(BATCH * 10)
    trainer = Trainer(data, (1.0, 4.0)[here.index], workers, seed=3)
    trainer.run(at)
    saved = trainer.sampler.state_dict()
    again = Trainer(data, (1.0, 4.0)[here.index], workers, seed=3)
    again.sampler.load_state_dict(saved)
    first = again.sampler.shares == trainer.sampler.shares
    again.sampler.set_epoch(again.sampler.epoch)  # as programs do: it goes on there
    again.run()
    return trainer.ids + again.ids, first, saved


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_job_has_each_row_once_in_the_order_of_the_epoch(ranks, workers):
    (mine, first, saved), (others, also_first, other_saved) = ranks(train_in_two_parts, workers, 6)
    order = list(brimful.GlobalSampler(BATCH * 10, batch_size=BATCH, seed=3, lag=100))
    assert [a + b for a, b in zip(mine, others, strict=True)] == order
    assert first and also_first
    assert saved == other_saved
    if workers == 0:
        assert len(mine[6]) > 57  # with the shares that were found


def resume_alone(saved):
    sampler = brimful.GlobalSampler(BATCH * 10, batch_size=BATCH, seed=3, lag=100)
    sampler.load_state_dict(saved)
    return list(sampler)


def test_another_number_of_ranks_goes_on_behind_the_same_step(ranks):
    (mine, _, saved), (others, _, _) = ranks(train_in_two_parts, 0, 4)
    assert resume_alone(saved) == [a + b for a, b in zip(mine[4:], others[4:], strict=True)]


def state_inside_the_loop(here):
    trainer = Trainer(Numbered(BATCH * 4), shuffle=False)
    return [trainer.sampler.state_dict()["row"] for _ in trainer.steps()]


def test_a_state_saved_behind_a_step_counts_it(ranks):
    assert ranks(state_inside_the_loop) == [[[96.0], [192.0], [288.0], [0.0]]] * 2


def fail_a_step(here):
    trainer = Trainer(Numbered(BATCH * 6))
    raised = 0
    for step, batch in enumerate(trainer.sizer.batches(trainer.loader)):
        trainer.ids.append(batch[2].tolist())

        def loss(model, piece, fails=step == 2 and here.index == 0):
            if fails:
                raise RuntimeError("planted")
            return cross_entropy(model, piece)

        try:
            trainer.sizer.step(batch, loss)
        except RuntimeError:
            raised += 1
        trainer.optimizer.zero_grad()
    return raised, trainer.ids, trainer.sampler.epoch


def test_a_step_that_failed_is_passed_over(ranks):
    (raised, mine, epoch), (also_raised, others, _) = ranks(fail_a_step)
    assert raised == also_raised == 1 and epoch == 1
    assert sorted(itertools.chain(*mine, *others)) == list(range(BATCH * 6))


def noted_by_hand(here):
    trainer = Trainer(Numbered(BATCH * 12), (1.0, 4.0)[here.index], lag=1)
    for batch in trainer.loader:
        trainer.ids.append(batch[2].tolist())
        trainer.sampler.note(trainer.sizer.step(batch, trainer.loss))
        trainer.optimizer.zero_grad()
    return [len(ids) for ids in trainer.ids]


def test_a_plain_loop_notes_outcomes_itself(ranks):
    mine, others = ranks(noted_by_hand)
    assert [a + b for a, b in zip(mine, others, strict=True)] == [BATCH] * 12
    assert mine[-1] > 57


def too_small_a_lag(here, lag):
    trainer = Trainer(Numbered(BATCH * 6), workers=2, lag=lag)
    try:
        trainer.run()
    except ValueError as error:
        return str(error)


def test_a_lag_that_is_too_small_is_named_with_the_right_one(ranks):
    for text in ranks(too_small_a_lag, 5):
        assert "lag: 5, num_workers: 2" in text and text.endswith("pass lag=6")
    assert ranks(too_small_a_lag, 6) == [None, None]


def test_batches_that_nobody_notes_end_with_the_remedy():
    sampler = brimful.GlobalSampler(40, batch_size=4, rank=1, world_size=2)
    with pytest.raises(
        ValueError,
        match=r"not noted yet .batches not noted: 2, lag: 2.; pass a larger lag .num_workers",
    ):
        list(sampler)


def test_a_loader_that_is_advised_has_its_steps_noted():
    sampler = brimful.GlobalSampler(8, batch_size=4)
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_sampler=sampler)
    model = nn.Linear(4, 1)
    sizer = brimful.BatchSizer(model)
    for (batch,) in sizer.batches(brimful.LoaderAdvisor(loader)):
        sizer.step(batch, lambda model, x: model(x).mean())
        model.zero_grad()
    assert sampler.epoch == 1


def test_a_step_behind_a_loop_that_was_left_is_not_noted():
    data = Numbered(40)
    model = net()
    sampler = brimful.GlobalSampler(data, batch_size=10)
    sizer = brimful.BatchSizer(model)
    for _ in sizer.batches(DataLoader(data, batch_sampler=sampler)):
        break
    state = sampler.state_dict()
    sizer.step(classes(10, dtype=torch.float64), cross_entropy)
    assert sampler.state_dict() == state


def test_a_sampler_without_a_process_group_has_the_whole_batch():
    data = TensorDataset(torch.arange(10.0).unsqueeze(1))
    sampler = brimful.GlobalSampler(data, batch_size=4, shuffle=False, lag=9)
    assert len(sampler) == 3 and sampler.lag == 9 and sampler.shares == [4]
    assert list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with pytest.raises(ValueError, match="batch_size: 0"):
        brimful.GlobalSampler(data, batch_size=0)
    with pytest.raises(ValueError, match="max_rows are fewer than a step has"):
        brimful.GlobalSampler(data, batch_size=8, rank=0, world_size=2, max_rows=[3, 4])


def persistent_workers(here):
    data = Numbered(BATCH * 3)
    trainer = Trainer(data, lag=6)
    trainer.loader = DataLoader(
        data, batch_sampler=trainer.sampler, persistent_workers=True, **with_workers(2)
    )
    for _ in range(3):
        trainer.run()
    dist.barrier()
    return trainer.ids


def test_workers_that_persist_have_the_next_epoch_in_each_pass(ranks):
    mine, others = ranks(persistent_workers)
    steps = [a + b for a, b in zip(mine, others, strict=True)]
    epochs = [steps[0:3], steps[3:6], steps[6:9]]
    assert len(steps) == 9 and epochs[0] != epochs[1] != epochs[2]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(BATCH * 3))


class Numbers(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(torch.arange(self.rows))


@pytest.mark.parametrize("by", [{"batch_size": 8}, {"cost": range(1, 31), "batch_cost": 60}])
def test_ranks_share_a_stream_and_go_on_in_it(by):
    def sampler_of(rank, world_size=2):
        return brimful.GlobalSampler(30, rank=rank, world_size=world_size, shuffle=False, **by)

    samplers = [sampler_of(rank) for rank in range(2)]
    passes = [iter(sampler.stream(Numbers(30))) for sampler in samplers]
    seen, states = [], []
    for _ in range(2):
        seen += [row for one in passes for row in next(one).tolist()]
        for sampler in samplers:
            sampler.note(None)
    states = [sampler.state_dict() for sampler in samplers]
    again = sampler_of(0, world_size=1)
    again.load_state_dict(states[0])
    rest = [row for batch in again.stream(Numbers(30)) for row in noted(again, batch)]
    assert sorted(seen) == list(range(len(seen)))
    assert sorted(seen + rest) == list(range(30))


def noted(sampler, batch):
    sampler.note(None)
    return batch.tolist()


def test_a_sizer_notes_the_steps_of_a_stream():
    sampler = brimful.GlobalSampler(10, batch_size=4, rank=0, world_size=1, shuffle=False)
    model = torch.nn.Linear(1, 1)
    sizer = brimful.BatchSizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    for batch in sizer.batches(sampler.stream(Numbers(10))):
        seen += batch.tolist()
        sizer.step(batch, lambda model, piece: model(piece.float().view(-1, 1)).mean())
        model.zero_grad()
    assert seen == list(range(10)) and sampler.epoch == 1


def test_a_stream_that_cannot_be_shared_is_refused():
    data = Numbers(9)
    with pytest.raises(ValueError, match=r"one order \(shuffle: True\)"):
        brimful.GlobalSampler(9, batch_size=4, rank=0, world_size=1).stream(data)
    sampler = brimful.GlobalSampler(12, batch_size=4, rank=0, world_size=1, shuffle=False)
    with pytest.raises(ValueError, match=r"fewer rows than the sampler \(rows of the stream: 9\)"):
        for _ in sampler.stream(data):
            sampler.note(None)
    with pytest.raises(TypeError, match="pass the number of its rows"):
        brimful.GlobalSampler(data, batch_size=4)
