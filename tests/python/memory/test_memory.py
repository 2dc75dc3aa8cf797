import gc
import threading

import pytest
import torch

from brimful import _C, memory

pytestmark = pytest.mark.usefixtures("no_limit")


def used():
    return memory.stats("cpu").used_bytes


def bytes_tensor(count):
    return torch.empty(count, dtype=torch.uint8)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(144, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
        )

    def forward(self, x):
        return self.layers(self.conv(x).relu().flatten(1))


def test_stats_count_every_live_byte():
    gc.collect()  # what other tests have left
    before = memory.stats("cpu")
    tensor = bytes_tensor(1000)
    now = memory.stats(torch.device("cpu"))
    assert now.used_bytes == before.used_bytes + 1000
    assert now.reserved_bytes == now.used_bytes
    assert now.allocations == before.allocations + 1
    assert now.limit_bytes is None
    thread = threading.Thread(target=lambda held: held.clear(), args=([tensor],))
    del tensor
    thread.start()
    thread.join()
    del thread
    gc.collect()
    assert used() == before.used_bytes


def test_peak_bytes_stay_until_they_are_reset():
    memory.reset_peak("cpu")
    before = used()
    del_me = bytes_tensor(4000)
    del del_me
    assert memory.stats("cpu").peak_bytes == before + 4000
    memory.reset_peak("cpu")
    assert memory.stats("cpu").peak_bytes == before


def test_stats_print_readable_bytes():
    memory.set_limit("cpu", 3 << 30)
    text = repr(memory.stats("cpu"))
    assert text.startswith("Stats(used=") and "limit=3.0 GiB" in text and "ooms=" in text
    memory.set_limit("cpu", None)
    assert "limit=None" in repr(memory.stats("cpu"))


def test_the_limit_holds_to_the_byte():
    base = used()
    memory.set_limit("cpu", base + 1000)
    assert memory.stats("cpu").limit_bytes == base + 1000
    ooms = memory.stats("cpu").ooms
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"CPU out of memory\. Tried to allocate 1001 B \(limit: .*used: ",
    ):
        bytes_tensor(1001)
    assert memory.stats("cpu").ooms == ooms + 1
    tensor = bytes_tensor(1000)
    memory.set_limit("cpu", base)  # below what is in use
    assert used() == base + 1000
    with pytest.raises(torch.OutOfMemoryError):
        bytes_tensor(1)
    del tensor


def test_conv2d_runs_and_runs_out_forward_and_backward():
    net, x = Net(), torch.randn(4, 2, 8, 8)
    net(x).sum().backward()
    net.zero_grad()
    base = used()
    memory.set_limit("cpu", base + 100)
    with pytest.raises(torch.OutOfMemoryError):
        net(x)
    memory.set_limit("cpu", None)
    loss = net(x).sum()
    memory.set_limit("cpu", used() + 100)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    del loss
    net.zero_grad()
    assert used() == base


def test_a_fault_at_any_allocation_of_a_step_arrives_typed_and_leaves_no_byte_behind():
    net, x, y = Net(), torch.randn(4, 2, 8, 8), torch.tensor([0, 1, 2, 0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step():
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    base = used()
    with _C._FaultAt(1 << 40) as never:
        step()
    optimizer.zero_grad()
    assert never.seen > 20
    for index in range(never.seen):
        with (
            pytest.raises(torch.OutOfMemoryError, match="planted fault"),
            _C._FaultAt(index) as fault,
        ):
            step()
        assert fault.fired
        optimizer.zero_grad()
        assert used() == base, index


def test_unlimited_is_never_refused_and_still_counted():
    base = used()
    memory.set_limit("cpu", base)
    with _C._Unlimited():
        tensor = bytes_tensor(1000)
    assert used() == base + 1000
    with pytest.raises(torch.OutOfMemoryError):
        bytes_tensor(1)
    del tensor


def test_peak_scopes_nest_and_keep_their_peak():
    base = used()
    with _C._PeakScope("cpu") as outer:
        bytes_tensor(3000)
        with _C._PeakScope(torch.device("cpu")) as inner:
            bytes_tensor(500)
        bytes_tensor(900)
        assert inner.peak_bytes == base + 500
    bytes_tensor(9000)
    assert outer.peak_bytes == base + 3000


def test_the_profiler_still_sees_cpu_memory():
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        tensor = bytes_tensor(12345)
        del tensor
    sizes = [event.cpu_memory_usage for event in profile.events()]
    assert 12345 in sizes
    assert -12345 in sizes


def test_shared_and_foreign_memory_goes_back_to_its_owner():
    base = used()
    tensor = bytes_tensor(5000)
    tensor.share_memory_()  # moves it out of the counted memory
    assert used() == base
    dense = torch.randn(4, 4, 4, 4)
    opaque = dense.to_mkldnn()  # oneDNN asks for raw memory
    assert torch.equal(opaque.to_dense(), dense)
    del tensor, dense, opaque
    assert used() == base


def test_release_cached_changes_no_count():
    base = used()
    memory.release_cached("cpu")
    assert used() == base


@pytest.mark.parametrize("bytes", [-1, -5])
def test_set_limit_refuses_a_negative_limit(bytes):
    with pytest.raises(
        ValueError, match=rf"limit must not be negative \(bytes: {bytes}\); None .*removes"
    ):
        memory.set_limit("cpu", bytes)


@pytest.mark.parametrize("bytes", [(1,), 1.5])
def test_set_limit_refuses_what_is_no_integer(bytes):
    with pytest.raises(TypeError):
        memory.set_limit("cpu", bytes)


@pytest.mark.parametrize(
    "device", ["meta", "mps", torch.device("meta"), "cuda:127", "nonsense", "cpu:x", ""]
)
def test_unknown_devices_are_refused_by_name(device):
    for call in (
        memory.stats,
        memory.reset_peak,
        memory.release_cached,
        lambda d: memory.set_limit(d, 5),
        lambda d: _C._PeakScope(d).__enter__(),
    ):
        with pytest.raises(ValueError, match=rf"\(device: {device}"):
            call(device)


@pytest.mark.parametrize("device", [0, None, 1.0])
def test_a_device_is_a_device_or_a_string(device):
    with pytest.raises(TypeError, match=r"device must be a torch\.device or a string .*\(device: "):
        memory.stats(device)


def test_a_fault_index_must_not_be_negative():
    with pytest.raises(ValueError, match=r"index must not be negative \(index: -1\)"):
        _C._FaultAt(-1).__enter__()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_stats_limit_and_peak():
    memory.release_cached("cuda")
    memory.reset_peak("cuda")
    base = memory.stats("cuda").used_bytes
    tensor = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    assert memory.stats("cuda").used_bytes == base + (8 << 20)
    with _C._PeakScope("cuda") as scope:
        more = torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
        del more
    assert scope.peak_bytes == base + (12 << 20)
    del tensor
    assert memory.stats("cuda").peak_bytes == base + (12 << 20)
    memory.set_limit("cuda", memory.stats("cuda").reserved_bytes + (32 << 20))
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    finally:
        memory.set_limit("cuda", None)
    assert torch.empty(1 << 30, dtype=torch.uint8, device="cuda").numel() == 1 << 30


@pytest.mark.gpu
def test_a_memory_fraction_of_the_programs_own_counts_and_comes_back():
    total = torch.cuda.mem_get_info()[1]
    assert memory.stats("cuda").limit_bytes is None
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        assert memory.stats("cuda").limit_bytes == pytest.approx(total / 2, abs=1)
        memory.set_limit("cuda", total // 4)
        memory.set_limit("cuda", total // 8)
        assert memory.stats("cuda").limit_bytes == total // 8
        memory.set_limit("cuda", None)
        assert torch.cuda.get_per_process_memory_fraction() == 0.5
        memory.set_limit("cuda", total // 8)
        torch.cuda.set_per_process_memory_fraction(0.75)
        assert memory.stats("cuda").limit_bytes == pytest.approx(total * 3 / 4, abs=1)
        memory.set_limit("cuda", None)
        assert torch.cuda.get_per_process_memory_fraction() == 0.75, "the newer one stays"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert memory.stats("cuda").limit_bytes is None


@pytest.mark.parametrize("bytes", [1.5, 2e9, float("inf"), float("nan"), object(), [1]])
def test_a_limit_that_is_no_whole_number_is_refused_in_plain_words(bytes):
    with pytest.raises(TypeError, match=r"a limit is a whole number of bytes.*\(bytes: ") as caught:
        memory.set_limit("cpu", bytes)
    assert "incompatible" not in str(caught.value)
    with pytest.raises(ValueError, match=r"too large \(bytes: \d+, most: 2\^63 - 1\)"):
        memory.set_limit("cpu", 1 << 63)
    assert memory.stats("cpu").limit_bytes is None
