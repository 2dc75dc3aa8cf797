"""Loops over batches of a pipeline of which each replica has another amount, and what else steps have in common."""

import signal

import pytest
import torch
import torch.nn.functional as F
from models import gradients_of, relative_difference
from rank_processes import raised
from test_pipeline_replicas import Grid, data, net
from torch import nn

import brimful
from brimful.metrics import Metrics

SIZES = ((4, 3, 2), (5,))  # rows of each batch, by replica


def batches_of(replica):
    x, y = data()
    begin = 9 * replica
    batches = []
    for rows in SIZES[replica]:
        batches.append((x[begin : begin + rows], y[begin : begin + rows]))
        begin += rows
    return batches


def expected_of(index):
    """Loss and gradients of a step over all replicas' batches of this number."""
    model = net()
    parts = [batches_of(r)[index] for r in (0, 1) if index < len(SIZES[r])]
    x, y = (torch.cat(both) for both in zip(*parts, strict=True))
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.item(), len(x), gradients_of(model)


def loop(here, schedule, tie):
    grid = Grid(here, schedule, tie=tie)
    seen = []
    for index, batch in enumerate(grid.pipe.batches(batches_of(grid.replica))):
        seen.append(batch is brimful.NO_DATA)
        outcome = grid.pipe.step(*((batch,) if batch is brimful.NO_DATA else batch))
        loss, rows, expected = expected_of(index)
        assert outcome.weight == rows
        if not tie:
            assert outcome.loss == pytest.approx(loss, rel=1e-12)
            own = {n: g for n, g in gradients_of(grid.model).items() if int(n[0]) // 2 == grid.rank}
            assert relative_difference(own, {n: expected[n] for n in own}) < 1e-12
        assert outcome.last == (index == 2)
        for parameter in grid.stage.parameters():
            parameter.grad = None
    return seen


@pytest.mark.parametrize(("schedule", "tie"), [("1f1b", False), ("zb_h1", False), ("1f1b", True)])
def test_replicas_without_data_take_part_until_all_end(ranks, schedule, tie):
    results = ranks(loop, schedule, tie, size=4)
    assert results[:2] == [[False] * 3] * 2
    assert results[2:] == [[False, True, True]] * 2


def threads(here):
    """Stages of one process, whose replicas are other processes."""
    model = net()
    stages = [brimful.DistributedDataParallel(s) for s in brimful.split_sequential(model, [2, 2])]
    pipe = brimful.Pipeline(stages, microbatches=2, loss_fn=F.mse_loss)
    steps = 0
    for index, batch in enumerate(pipe.batches(batches_of(here.index))):
        pipe.step(*((batch,) if batch is brimful.NO_DATA else batch))
        expected = expected_of(index)[2]
        assert relative_difference(gradients_of(model), expected) < 1e-12
        for parameter in model.parameters():
            parameter.grad = None
        steps += 1
    assert pipe.report().steps == 3
    return steps


def test_stages_in_threads_loop_too(ranks):
    assert ranks(threads, size=2) == [3, 3]


def bad_loader(here, place):
    grid = Grid(here)

    def batches():
        for index, batch in enumerate(batches_of(0)):
            if here.index == 1 and index == place:
                raise OSError("the disk is gone")
            yield batch

    def run():
        for batch in grid.pipe.batches(batches()):
            grid.pipe.step(*batch)

    error = raised(run)
    return type(error).__name__, str(error)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_loader_that_fails_on_one_rank_fails_the_step_of_all(ranks, place):
    results = ranks(bad_loader, place, size=4)
    for index, (name, text) in enumerate(results):
        assert name == ("OSError" if index == 1 else "RankFailed"), results
        assert "the disk is gone" in text


def half(here):
    """Two ranks of a pipeline that are given unlike things."""
    grid = Grid(here)
    batch = (brimful.NO_DATA,) if here.index == 1 else (grid.x, grid.y)
    error = raised(grid.pipe.step, *batch)
    grid.step()
    return type(error).__name__, str(error), grid.close()


def test_ranks_of_a_replica_that_disagree_about_its_data_raise(ranks):
    for name, text, close in ranks(half, size=4):
        assert name in ("ValueError", "RankFailed"), text
        assert close


def nobody(here):
    grid = Grid(here)
    error = raised(grid.pipe.step, brimful.NO_DATA)
    grid.step()
    return str(error), grid.close()


def test_a_step_in_which_no_replica_has_data_raises_on_all(ranks):
    for text, close in ranks(nobody, size=4):
        assert "nothing" in text or "weight" in text
        assert close


def test_alone_a_loop_is_a_plain_one():
    torch.manual_seed(0)
    stages = [nn.Linear(6, 6), nn.Linear(6, 6)]
    pipe = brimful.Pipeline(stages, microbatches=2, loss_fn=F.mse_loss)
    x = torch.randn(8, 6)
    outcomes = [pipe.step(*batch) for batch in pipe.batches([(x, x)] * 3)]
    assert [o.last for o in outcomes] == [False, False, True]
    with pytest.raises(RuntimeError, match=r"call pipeline\.step for every batch"):
        for _ in pipe.batches([(x, x)] * 2):
            pass


def two_stages():
    torch.manual_seed(0)
    return [nn.Linear(6, 6), nn.Linear(6, 6)]


def stopping(here):
    stages = [brimful.DistributedDataParallel(stage) for stage in two_stages()]
    pipe = brimful.Pipeline(stages, microbatches=2, loss_fn=F.mse_loss)
    steps = 0
    for x, y in pipe.batches([(torch.ones(4, 6), torch.zeros(4, 6))] * 9):
        if (here.index, steps) == (1, 2):
            brimful.request_stop(signal.SIGTERM)
        outcome = pipe.step(x, y)
        steps += 1
        assert outcome.stop == outcome.last == (steps == 3)
    return steps, brimful.stop_exit_code()


def test_stages_in_threads_stop_behind_the_same_step(ranks):
    assert ranks(stopping) == [(3, 143)] * 2


class Kept:
    def __init__(self):
        self.samples = []

    def write(self, sample):
        self.samples.append(sample)

    def close(self):
        pass


def looked_at(here):
    pipe = brimful.Pipeline(
        [two_stages()[here.index]],
        group=torch.distributed.group.WORLD,
        microbatches=2,
        loss_fn=F.mse_loss,
    )
    kept = Kept()
    with Metrics(pipeline=pipe, to=[kept], interval_s=0):
        for x, y in pipe.batches([(torch.ones(4, 6), torch.zeros(4, 6))] * 2):
            outcome = pipe.step(x, y)
    values = kept.samples[-1].values
    return values["steps_total"], values["pieces"], values["loss"] == pytest.approx(outcome.loss)


def test_metrics_of_stages_in_processes(ranks):
    assert ranks(looked_at) == [(2, 2, True)] * 2


@pytest.mark.parametrize("options", [{}, {"predict": True}, {"by_length": True}])
def test_a_sizer_around_a_pipeline_says_what_a_pipeline_has(options):
    pipe = brimful.Pipeline(two_stages(), loss_fn=F.mse_loss)
    with pytest.raises(TypeError, match=r"Pipeline makes steps itself .* call its step"):
        brimful.BatchSizer(pipe, **options)
