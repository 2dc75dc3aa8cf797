"""What a sizer has seen, as numbers and as a few lines."""

import pytest
import torch
from models import classes, cross_entropy
from rank_processes import raised

import brimful

pytestmark = pytest.mark.usefixtures("no_limit")


def planted(failures):
    """Runs out of memory in its first calls."""
    left = [failures]

    def loss(model, piece):
        if left[0] > 0:
            left[0] -= 1
            raise torch.OutOfMemoryError("planted")
        return cross_entropy(model, piece)

    return loss


def net():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def test_a_new_sizer_has_seen_nothing():
    report = brimful.BatchSizer(net()).report()
    assert (report.steps, report.retries, report.ooms, report.history) == (0, 0, 0, [])
    assert report.last_fill is None and report.limit_bytes is None
    assert str(report).startswith("steps: 0 (")


def test_steps_retries_and_failures_are_counted():
    model = net()
    sizer = brimful.BatchSizer(model, max_retries=2, ladder="split")
    for failures in (0, 2, 0):
        sizer.step(classes(8), planted(failures))
        model.zero_grad()
    assert type(raised(sizer.step, classes(8), planted(9))) is brimful.BatchTooLarge
    assert type(raised(sizer.step, classes(8), lambda model, piece: 1 / 0)) is ZeroDivisionError
    assert type(raised(sizer.step, None, cross_entropy)) is TypeError  # no work began: not counted
    report = sizer.report()
    assert (report.steps, report.failed) == (3, 2)
    assert (report.retries, report.ooms) == (4, 5)
    assert report.piece_rows == 1
    assert [note.pieces for note in report.history] == [1, 4, 4, 8, 8]
    assert [note.piece_rows for note in report.history] == [8, 2, 2, 1, 1]
    assert [note.retries for note in report.history] == [0, 2, 0, 2, 0]
    assert [note.ooms for note in report.history] == [0, 2, 0, 3, 0]
    assert [note.stood for note in report.history] == [True] * 3 + [False] * 2
    assert report.history[0].lost_ms == report.history[2].lost_ms == 0
    assert 0 < report.history[1].lost_ms < report.history[1].total_ms
    assert report.history[3].lost_ms == report.history[3].total_ms
    assert report.lost_ms == pytest.approx(sum(note.lost_ms for note in report.history))
    assert report.total_ms == pytest.approx(sum(note.total_ms for note in report.history))
    assert (
        "steps: 3 (failed: 2, retries: 4, out of memory here: 5, cache released: 0, garbage collected: 0)"
        in str(report)
    )


def test_fill_is_the_peak_over_the_limit():
    model = net()
    sizer = brimful.BatchSizer(model)
    limit = brimful.memory.stats("cpu").used_bytes + (1 << 20)
    peaks = []
    for rows in (64, 16, 32):
        brimful.memory.set_limit("cpu", limit)
        peaks.append(sizer.step(classes(rows), cross_entropy).peak_bytes)
        model.zero_grad()
    report = sizer.report()
    assert report.limit_bytes == limit and report.peak_bytes == peaks[-1]
    assert report.last_fill == pytest.approx(peaks[-1] / limit)
    assert report.most_fill == pytest.approx(peaks[0] / limit)
    assert report.mean_fill == pytest.approx(sum(peaks) / 3 / limit)
    brimful.memory.set_limit("cpu", None)
    sizer.step(classes(8), cross_entropy)
    assert sizer.report().last_fill is None and sizer.report().mean_fill == report.mean_fill


def test_its_history_is_bounded():
    model = net()
    sizer = brimful.BatchSizer(model)
    for rows in range(1, 81):
        sizer.step(classes(rows), cross_entropy)
        model.zero_grad()
    report = sizer.report()
    assert report.steps == 80
    assert [note.piece_rows for note in report.history] == list(range(17, 81))
