"""Pieces grow again, without prediction, when there is room for larger ones: by what was seen, not by trying."""

import itertools

import pytest
import torch
from models import used

import brimful

ROWS = 600


@pytest.fixture(autouse=True)
def lifted(no_limit):
    pass


def square(model, piece):
    return model(piece).square().mean()


class Loop:
    """Steps of one model over one batch."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
        )
        self.batch = torch.randn(ROWS, 20)
        self.sizer = brimful.BatchSizer(self.model, predict=False)
        self.base = used()

    def room(self, bytes):
        brimful.memory.set_limit("cpu", self.base + bytes)

    def steps(self, count):
        made = []
        for _ in range(count):
            made.append(self.sizer.step(self.batch, square))
            self.model.zero_grad()
        return made

    def unsplit(self):
        """Bytes of an unsplit step; a second one allocates no more for the first time."""
        self.steps(1)
        self.base = used()
        return self.steps(1)[0].peak_bytes - self.base


def test_one_retry_for_the_first_cut_and_none_for_a_second_one_and_on_the_way_back():
    loop = Loop()
    unsplit = loop.unsplit()
    for first in (1, 0):
        loop.room(int(0.55 * unsplit))
        cut = loop.steps(6)
        assert [outcome.retries for outcome in cut] == [first, 0, 0, 0, 0, 0]
        assert all(outcome.pieces > 1 for outcome in cut)
        loop.room(int(1.05 * unsplit))
        restored = loop.steps(3)
        assert [outcome.retries for outcome in restored] == [0, 0, 0]
        assert [outcome.pieces for outcome in restored] == [1, 1, 1]


def test_sizes_never_seen_are_reached_without_running_out():
    loop = Loop()
    unsplit = loop.unsplit()
    fresh = Loop()
    fresh.room(int(0.2 * unsplit))
    first = fresh.steps(4)
    assert first[0].retries > 0 and first[-1].pieces > 4
    refused = brimful.memory.stats("cpu").ooms
    fresh.room(int(1.1 * unsplit))
    pieces = [outcome.pieces for outcome in fresh.steps(8)]
    assert brimful.memory.stats("cpu").ooms == refused
    assert pieces[-1] == 1 and pieces == sorted(pieces, reverse=True)


def test_a_size_that_fails_although_there_is_room_is_tried_more_and_more_rarely():
    loop = Loop()
    loop.unsplit()
    loop.room(10**8)
    failed = []

    def passing(model, piece):  # something else takes the room, whenever the batch is whole
        if len(piece) == ROWS:
            raise torch.OutOfMemoryError("CUDA out of memory. Planted")
        return square(model, piece)

    for _ in range(120):
        failed.append(loop.sizer.step(loop.batch, passing).retries)
        loop.model.zero_grad()
    tries = [step for step, retries in enumerate(failed) if retries]
    assert tries[0] == 0 and 2 <= len(tries) <= 4
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert all(gap >= 2 * before for before, gap in itertools.pairwise(gaps))


def test_a_given_split_is_not_changed_and_pieces_that_were_asked_for_stay():
    loop = Loop()
    loop.unsplit()
    loop.room(10**8)
    assert loop.sizer.step(loop.batch, square, split=[400, 200]).split == [400, 200]
    loop.model.zero_grad()
    asked = brimful.BatchSizer(loop.model, pieces=3, predict=False)
    for _ in range(3):
        assert asked.step(loop.batch, square).pieces == 3
        loop.model.zero_grad()
