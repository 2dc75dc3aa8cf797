"""The loader advisor, in loops that wait for data and loops that do not."""

import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import brimful
from brimful import _C


class Slow(Dataset):
    """Samples that take `ms` each."""

    def __init__(self, ms, size=24):
        self.ms, self.size = ms, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(self.ms / 1000)
        return torch.tensor([float(index)])


class Growing(Slow):
    """A cache that grows with every sample, in the worker."""

    def __init__(self):
        super().__init__(0, 60)
        self.cache = []

    def __getitem__(self, index):
        self.cache.append(bytearray(b"x" * (2 << 20)))
        return super().__getitem__(index)


def loop(loader, work_ms, steps=10):
    advisor = brimful.LoaderAdvisor(loader, steps=steps)
    seen = []
    for batch in advisor:
        seen.append(batch)
        time.sleep(work_ms / 1000)
    return advisor.advice(), seen


@pytest.fixture
def eight_cpus(monkeypatch):
    monkeypatch.setattr(_C, "_usable_cpus", lambda: 8.0)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def test_a_slow_dataset_wants_workers(eight_cpus):
    advice, seen = loop(DataLoader(Slow(30), batch_size=2), work_ms=10)
    assert advice.wait_share > 0.5
    assert 2 <= advice.num_workers <= 7
    assert "waiting for data" in advice.reasons[0]
    assert torch.cat(seen).flatten().tolist() == list(map(float, range(24)))


def test_a_slow_step_wants_nothing(eight_cpus):
    advice, _ = loop(DataLoader(Slow(0, size=16), batch_size=2), work_ms=150)
    assert advice.wait_share < 0.05
    assert advice.num_workers == 0
    assert "nothing to gain" in advice.reasons[0]
    assert "nothing to gain" in str(advice)


def test_advice_is_capped_by_the_cpus(monkeypatch):
    monkeypatch.setattr(_C, "_usable_cpus", lambda: 3.0)
    advice, _ = loop(DataLoader(Slow(10), batch_size=2), work_ms=1)
    assert advice.num_workers == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    advice, _ = loop(DataLoader(Slow(10), batch_size=2), work_ms=1)
    assert advice.num_workers == 1


def test_too_few_steps_are_only_a_start(eight_cpus):
    advice, _ = loop(DataLoader(Slow(1), batch_size=12), work_ms=1)
    assert advice.num_workers == 4
    assert "too few steps" in advice.reasons[0]
    assert brimful.LoaderAdvisor([1, 2]).advice().num_workers == 4


def test_workers_that_grow_are_reported(eight_cpus):
    loader = DataLoader(Growing(), batch_size=1, num_workers=1)
    advice, _ = loop(loader, work_ms=0, steps=50)
    assert any("private memory grew by" in reason for reason in advice.reasons)


def test_copies_are_measured_apart(monkeypatch, eight_cpus):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def pinned(copies_ms):
        advisor = brimful.LoaderAdvisor(DataLoader(Slow(0), batch_size=1), steps=12)
        for _, copy_ms in zip(advisor, copies_ms, strict=False):
            with advisor.copying():
                if copy_ms:
                    time.sleep(copy_ms / 1000)
            time.sleep(0.01)
        return advisor.advice().pin_memory

    assert pinned([8] * 24)
    assert not pinned([0] * 24)
    assert not pinned([0, 80] + [0] * 22)  # once the machine was busy


def test_every_batch_comes_once_and_in_order_whatever_is_measured():
    for steps in (1, 3, 100):
        advisor = brimful.LoaderAdvisor(range(7), steps=steps)
        assert [list(advisor), list(advisor)] == [list(range(7))] * 2
    assert len(brimful.LoaderAdvisor([1, 2, 3])) == 3
    assert list(brimful.LoaderAdvisor([])) == []


def test_an_error_of_the_loader_comes_through():
    def broken():
        yield 1
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(brimful.LoaderAdvisor(broken()))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"steps: 0"):
        brimful.LoaderAdvisor([1], steps=0)
