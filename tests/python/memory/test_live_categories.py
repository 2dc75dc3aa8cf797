"""The peak by category from Python; the core's rules are tested in C++."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from brimful import memory


def train(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(8, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 8))


def size_of(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("given", [True, False])
def test_what_models_and_optimizers_hold_is_found(model, given):
    optimizer = torch.optim.Adam(model.parameters())
    memory.reset_peak("cpu")
    with memory.track():
        train(model, optimizer)
        chosen = {"models": model, "optimizers": optimizer} if given else {}
        peak = memory.peak_by_category(**chosen)
        found = peak.by_category
        assert peak.bytes == memory.stats("cpu").peak_bytes == sum(found.values())
    state = [t for values in optimizer.state.values() for t in values.values()]
    assert found["optimizer_state"] == size_of(state)
    if given:
        assert found["parameters"] == size_of(model.parameters())
        assert found["buffers"] == size_of(model.buffers())
    else:  # of the whole process
        assert found["parameters"] >= size_of(model.parameters())


def test_a_peak_can_be_read_after_the_end(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory.reset_peak("cpu")
    with memory.track():
        train(model, optimizer)
        inside = memory.peak_by_category(models=model)
    after = memory.peak_by_category(models=model)
    assert (after.bytes, after.by_category) == (inside.bytes, inside.by_category)


def test_modules_have_their_parts(model):
    with memory.track(modules=model):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        peak = memory.peak_by_category(models=model)
    by_module = peak.by_module
    assert {"0", "1", "2", "3"} & set(by_module)
    total = sum(sum(parts.values()) for parts in by_module.values())
    assert total == sum(site.bytes for site in peak.by_site) == peak.bytes - peak.before_bytes


def test_a_thread_that_runs_nothing_but_backwards_distinguishes_them():
    """As autograd's own threads of a CUDA device do."""
    weight = torch.ones(8, 8, requires_grad=True)

    def inner(x):
        return (x @ weight).exp()

    with ThreadPoolExecutor(1) as thread, memory.track():
        for rows, spike in ((4, 100_000), (64, 0)):  # nothing of the first backward is at a peak
            memory.reset_peak("cpu")
            torch.empty(spike)
            y = inner(torch.ones(rows, 8)).exp()
            thread.submit(y.backward, torch.ones_like(y)).result()
        peak = memory.peak_by_category()
    found = {s.category: s.bytes for s in peak.by_site if s.site.function.endswith("inner")}
    assert found["activations"] == 64 * 8 * 4
    assert found["temporaries"] == 64 * 8 * 4  # their gradient


def test_what_lives_now_adds_up_too(model):
    with memory.track():
        kept = model(torch.randn(4, 8))
        found = memory.live_by_category(models=model)
        assert sum(found.values()) == memory.stats("cpu").used_bytes
        assert found["activations"] >= kept.nbytes
        assert found["buffers"] == size_of(model.buffers())


def test_tensors_that_no_allocator_here_holds_have_no_category(model):
    model.share_memory()
    with memory.track():
        assert memory.live_by_category(models=model)["parameters"] == 0


@pytest.mark.gpu
def test_cuda_adds_up_to_torchs_peak(model):
    model.cuda()
    with memory.track():
        torch.zeros(1)  # the table of the GPU begins
        memory.reset_peak("cuda")
        for _ in range(2):
            y = model(torch.randn(64, 8, device="cuda"))
            assert memory.find_block(y).phase == "forward"
            y.square().sum().backward()
        peak = memory.peak_by_category("cuda", models=model)
        assert peak.bytes == torch.cuda.max_memory_allocated()
        assert sum(peak.by_category.values()) == peak.bytes
        assert peak.by_category["parameters"] == size_of(model.parameters())
        counts = memory.tracking_counts("cuda")
        assert counts.births > 0
        assert counts.unsited == 0
