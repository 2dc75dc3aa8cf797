"""On a GPU what was offloaded comes back while what was put aside behind it is used."""

import pytest
import torch

from brimful import _C

pytestmark = pytest.mark.alone
MIB = 1 << 20


def allocated():
    """A block that a copy has used is free once the device is done with it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def put_aside(count, fetch_ahead, mib=1):
    """So many tensors, as a forward saves them: what took their place, and copies."""
    aside = _C._Aside("cuda:0", None, fetch_ahead)
    tensors = [torch.randn(mib * MIB // 4, device="cuda") for _ in range(count)]
    copies = [tensor.cpu() for tensor in tensors]
    saved = [aside.put(tensor) for tensor in tensors]
    tensors.clear()
    return saved, copies


@pytest.mark.gpu
@pytest.mark.parametrize("fetch_ahead", [False, True])
def test_the_one_put_aside_before_comes_back_too(fetch_ahead):
    saved, copies = put_aside(3, fetch_ahead)
    before = allocated()
    taken = []
    for place in reversed(range(3)):  # as a backward does
        tensor = _C._Aside.get(saved[place])
        taken.append((allocated() - before) // MIB)
        assert torch.equal(tensor.cpu(), copies[place])
        saved[place] = tensor = None
    assert taken == ([2, 2, 1] if fetch_ahead else [1, 1, 1])
    assert allocated() == before


@pytest.mark.gpu
def test_what_was_fetched_ahead_and_is_not_used_goes_with_what_saved_it():
    saved, copies = put_aside(2, True)
    before = allocated()
    tensor = _C._Aside.get(saved[1])
    assert allocated() - before == 2 * MIB
    saved.pop(0)
    assert allocated() - before == MIB
    assert torch.equal(tensor.cpu(), copies[1])


@pytest.mark.gpu
def test_where_there_is_no_room_ahead_it_comes_back_when_it_is_used():
    saved, copies = put_aside(2, True, mib=16)
    _, total = torch.cuda.mem_get_info()
    before = allocated()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 17 * MIB) / total)
    try:
        for place in (1, 0):
            tensor = _C._Aside.get(saved[place])
            assert allocated() - before == 16 * MIB
            assert torch.equal(tensor.cpu(), copies[place])
            saved[place] = tensor = None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
