"""Global batches that are filled by what rows cost, and shared by it."""

import itertools
import multiprocessing
import statistics
import time

import numpy as np
import pytest
import torch
from models import wrap
from torch import nn
from torch.utils.data import DataLoader

import brimful

ROWS = 1600
BATCH_COST = 4000
CROSSOVER = 60.0


def lengths(rows=ROWS):
    torch.manual_seed(1)
    drawn = torch.empty(rows).log_normal_(4.2, 0.8)
    return drawn.long().clamp(1, 400)


class Texts(torch.utils.data.Dataset):
    """A row is its number."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return torch.tensor([float(index)]), index


def with_workers(workers):
    """Options of a loader in a rank, which is a daemon and would start a server to fork from."""
    multiprocessing.current_process()._config["daemon"] = False
    return {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}


class Trainer:
    """A rank whose rows take as long as n + n * n / CROSSOVER."""

    def __init__(self, workers=0, **batch):
        self.model = wrap(nn.Linear(1, 1))
        self.sizer = brimful.BatchSizer(self.model)
        self.times = times_of(lengths())
        self.sampler = brimful.GlobalSampler(Texts(), lag=2 * workers + 2, **batch)
        self.loader = DataLoader(Texts(), batch_sampler=self.sampler, **with_workers(workers))
        self.ids = []  # by step

    def loss(self, model, piece):
        time.sleep(1e-6 * float(self.times[piece[1]].sum()))
        return model(piece[0] / ROWS).square().mean()

    def run(self, most=None):
        for batch in self.sizer.batches(self.loader):
            self.ids.append([] if batch is brimful.NO_DATA else batch[1].tolist())
            self.sizer.step(batch, self.loss)
            self.model.zero_grad()
            if len(self.ids) == most:
                return


def times_of(cost):
    return cost + cost.double().square() / CROSSOVER


def train(here):
    trainer = Trainer(cost=lengths(), batch_cost=BATCH_COST)
    batches = len(trainer.sampler)
    trainer.run()
    return trainer.ids, batches, trainer.sampler.state_dict()


def test_ranks_train_on_each_row_once_and_agree(ranks):
    (mine, batches, saved), (others, other_batches, other_saved) = ranks(train)
    assert saved == other_saved
    assert len(saved["seen"]) == 6 * 3 * 2  # of six steps times and costs
    assert len(mine) == len(others) == batches == other_batches
    assert sorted(itertools.chain(*mine, *others)) == list(range(ROWS))
    for rows in zip(mine, others, strict=True):
        assert int(lengths()[rows[0] + rows[1]].sum()) <= BATCH_COST


def unevenness(**batch):
    """The slower of two ranks' times over half of both, by the rows that they had; the median of the last steps."""
    times = times_of(lengths())
    samplers = [brimful.GlobalSampler(ROWS, rank=i, world_size=2, **batch) for i in range(2)]
    found = []
    for rows in zip(*samplers, strict=True):
        of_rank = [float(times[own].sum()) for own in rows]
        found.append(2 * max(of_rank) / sum(of_rank))
        for sampler in samplers:
            sampler._core.note(of_rank)
    return statistics.median(found[15:])


def test_ranks_come_nearer_to_equal_times_than_by_rows():
    by_cost = unevenness(cost=lengths(), batch_cost=BATCH_COST)
    by_rows = unevenness(batch_size=ROWS * BATCH_COST // int(lengths().sum()))
    assert by_cost < 1.08 < by_rows


def train_in_two_parts(here, workers):
    batch = {"cost": lengths().numpy(), "batch_cost": BATCH_COST, "seed": 3}
    trainer = Trainer(workers, **batch)
    trainer.run(5)
    saved = trainer.sampler.state_dict()
    again = Trainer(workers, **batch)
    again.sampler.load_state_dict(saved)
    alike = again.sampler.shares == trainer.sampler.shares
    again.run()
    return trainer.ids + again.ids, alike


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_job_has_each_row_once(ranks, workers):
    (mine, alike), (others, also_alike) = ranks(train_in_two_parts, workers)
    assert alike and also_alike
    alone = brimful.GlobalSampler(
        ROWS, cost=lengths(), batch_cost=BATCH_COST, seed=3, lag=ROWS, rank=0, world_size=1
    )
    whole = [sorted(rows) for rows in alone]
    assert [sorted(a + b) for a, b in zip(mine, others, strict=True)] == whole


def batches_of(cost, **options):
    options = {"batch_cost": 10, "rank": 0, "world_size": 1, "lag": 99, **options}
    return list(brimful.GlobalSampler(8, cost=cost, shuffle=False, **options))


def test_costs_are_a_sequence_an_array_or_a_tensor():
    cost = [4, 4, 4, 1, 20, 5, 2, 9]
    expected = [[0, 1], [2, 3], [4], [5, 6], [7]]
    frozen = np.array(cost)
    frozen.flags.writeable = False
    for given in (
        cost,
        tuple(cost),
        frozen,
        np.array(cost, dtype=np.uint16),
        list(frozen),
        torch.tensor(cost, dtype=torch.int32),
        torch.tensor(cost).repeat_interleave(2)[::2],
    ):
        assert batches_of(given) == expected
    assert batches_of(cost, drop_last=True) == expected[:-1]
    assert len(brimful.GlobalSampler(0, cost=[], batch_cost=5, rank=0, world_size=1)) == 0


@pytest.mark.parametrize(
    ("cost", "error", "message"),
    [
        ([1] * 7, ValueError, r"rows: 8, shape: \[7\]"),
        (torch.ones(8, 1).long(), ValueError, r"shape: \[8, 1\]"),
        ([1] * 7 + [0], ValueError, "row: 7, cost: 0"),
        ([-1] * 8, ValueError, "row: 0, cost: -1"),
        ([1 << 30] * 8, ValueError, "cost: 1073741824"),
        ([1.0] * 8, TypeError, "dtype: Float"),
        (np.full(8, np.nan), TypeError, "dtype: Double"),
        ([True] * 8, TypeError, "dtype: Bool"),
        ([None] * 8, TypeError, "a whole number for each row"),
        ([1 << 70] * 8, TypeError, "a whole number for each row"),
        (object(), TypeError, "type: object"),
    ],
)
def test_costs_that_are_none_are_refused(cost, error, message):
    with pytest.raises(error, match=message):
        batches_of(cost)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"batch_size": 4, "batch_cost": 10},
        {"batch_size": 4, "cost": [1] * 8},
        {"cost": [1] * 8},
        {"batch_cost": 10},
        {"batch_size": 4, "cost": [1] * 8, "batch_cost": 10},
    ],
)
def test_a_batch_is_of_rows_or_of_costs(given):
    with pytest.raises(ValueError, match="batch_size, or cost and batch_cost"):
        brimful.GlobalSampler(8, rank=0, world_size=1, **given)


def test_a_state_of_other_costs_is_refused():
    def sampler(cost, **options):
        return brimful.GlobalSampler(len(cost), cost=cost, rank=0, world_size=2, **options)

    state = sampler([1, 2, 3, 4], batch_cost=5).state_dict()
    sampler([1, 2, 3, 4], batch_cost=8).load_state_dict(state)
    with pytest.raises(ValueError, match="other costs"):
        sampler([1, 2, 4, 3], batch_cost=5).load_state_dict(state)
    with pytest.raises(ValueError, match="a sampler with cost"):
        brimful.GlobalSampler(4, batch_size=2, rank=0, world_size=2).load_state_dict(state)
    with pytest.raises(ValueError, match="larger batch_cost"):
        sampler([1, 2, 3, 4], batch_cost=1)
