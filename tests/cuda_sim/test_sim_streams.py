"""Streams and events: what no event orders is seen out of order."""

import ctypes
import threading

import pytest
import torch
from simulation import MIB, program, set_delay, sim
from torch import nn


def hold(stream):
    sim.sim_cuda_hold(ctypes.c_void_p(stream.cuda_stream))


@pytest.mark.parametrize("delay_us", [None, 20_000])
def test_a_copy_to_pinned_memory_is_not_there_before_somebody_waits(delay_us):
    set_delay(delay_us)
    host = torch.zeros(MIB, pin_memory=True)
    x = torch.ones(MIB, device="cuda")
    torch.cuda.synchronize()
    host.copy_(x, non_blocking=True)
    late = host[-1].item() == 0
    torch.cuda.synchronize()
    assert host[-1].item() == 1
    assert late == (delay_us is not None)


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_waits_for_no_copy_sees_old_values(waits):
    side = torch.cuda.Stream()
    source = torch.full((MIB,), 3.0, pin_memory=True)
    y = torch.zeros(MIB, device="cuda")
    torch.cuda.synchronize()
    hold(side)
    with torch.cuda.stream(side):
        y.copy_(source, non_blocking=True)
        done = side.record_event()
    if waits:
        torch.cuda.current_stream().wait_event(done)
    assert (y.sum().item() == 3 * MIB) == waits
    torch.cuda.synchronize()


def test_events_are_done_in_time():
    set_delay(20_000)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(5_000_000)
    end.record()
    assert not end.query()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 5


def pass_time(stream, seconds):
    sim.sim_cuda_pass_time(ctypes.c_void_p(stream.cuda_stream), ctypes.c_long(seconds * 1_000_000))


@pytest.mark.parametrize("delay_us", [None, 2_000])
def test_time_that_passes_on_a_stream_passes_for_those_that_wait_for_it(delay_us):
    set_delay(delay_us)
    streams = [torch.cuda.Stream() for _ in range(3)]
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in streams] for _ in range(2))
    for stream, start in zip(streams, starts, strict=True):
        start.record(stream)
    pass_time(streams[0], 1000)
    streams[1].wait_stream(streams[0])
    for stream, end in zip(streams, ends, strict=True):
        end.record(stream)
    torch.cuda.synchronize()
    took = [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
    assert 1e6 <= took[0] < 2e6
    assert 1e6 <= took[1] < 2e6
    assert took[2] < 5e5


def test_memory_that_a_stream_uses_is_not_given_out_again():
    set_delay(20_000)
    side = torch.cuda.Stream()
    x = torch.ones(MIB, device="cuda")
    place = x.data_ptr()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000)
        x.record_stream(side)
    del x
    assert torch.empty(MIB, device="cuda").data_ptr() != place
    torch.cuda.synchronize()
    assert torch.empty(MIB, device="cuda").data_ptr() == place


def test_a_kernel_that_waits_for_no_other_kernel_reads_old_values():
    side, x = torch.cuda.Stream(), torch.zeros(8, device="cuda")
    for waits in (False, True):
        x.zero_()
        torch.cuda.synchronize()
        hold(side)
        with torch.cuda.stream(side):
            x.add_(1)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        read = (x * 2).tolist()
        assert read == [2.0 if waits else 0.0] * 8
        torch.cuda.synchronize()
        assert x.tolist() == [1.0] * 8


def test_a_kernel_that_waits_for_no_reader_overwrites_what_it_reads():
    side = torch.cuda.Stream()
    for waits in (False, True):
        x = torch.ones(8, device="cuda")
        torch.cuda.synchronize()
        hold(side)
        with torch.cuda.stream(side):
            read = x * 2
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        x.fill_(5)
        torch.cuda.current_stream().synchronize()
        torch.cuda.synchronize()
        assert read.tolist() == [2.0 if waits else 10.0] * 8


def test_an_operator_inside_the_call_overtakes_nothing_of_another_thread():
    set_delay(50)
    stop, wrong = threading.Event(), []

    def read_and_free():
        for value in range(300):
            x = torch.full((64,), float(value), device="cuda")
            y = x * 2
            del x  # the next tensor of this size lies there, while the product has still to be made
            if y.tolist() != [2.0 * value] * 64:
                wrong.append(value)
        stop.set()

    reader = threading.Thread(target=read_and_free)
    reader.start()
    while not stop.is_set():
        torch.dropout(torch.ones(64, device="cuda"), 0.5, True)
    reader.join()
    assert wrong == []


def test_memory_of_a_stream_that_was_not_recorded_is_given_out_too_early():
    side = torch.cuda.Stream()
    for recorded in (False, True):
        x = torch.ones(MIB, device="cuda")
        torch.cuda.synchronize()
        hold(side)
        with torch.cuda.stream(side):
            read = x * 2
        if recorded:
            x.record_stream(side)
        del x
        other = torch.full((MIB,), 7.0, device="cuda")
        torch.cuda.current_stream().synchronize()
        side.synchronize()
        assert read[0].item() == (2.0 if recorded else 14.0)
        del other, read


def test_the_sizes_of_results_are_known_before_their_values():
    hold(torch.cuda.default_stream())
    x = torch.ones(4, 6, device="cuda")
    y = torch.relu(x[:, :3] @ x[1:].T[:3])
    top = y.topk(2)
    assert not torch.cuda.default_stream().query()
    assert y.shape == (4, 3)
    assert top.indices.shape == (4, 2)
    assert y.tolist() == [[3.0] * 3] * 4


@pytest.mark.parametrize("delay_us", [None, 300])
def test_training_behind_the_host_s_back_gives_the_same_loss(delay_us):
    losses = []
    for us in (None, delay_us):
        set_delay(us)
        torch.manual_seed(0)
        layers = [nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.BatchNorm1d(16)]
        model = nn.Sequential(*layers).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).cuda()
        for _ in range(4):
            loss = nn.functional.mse_loss(model(x), x)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == losses[1]


LATE_ASSERTION = """
import ctypes, torch
sim = ctypes.CDLL(None)
table, index = torch.ones(10, 4, device="cuda"), torch.tensor([10], device="cuda")
torch.cuda.synchronize()
sim.sim_cuda_hold(ctypes.c_void_p(0))
found = table.index_select(0, index)
print("called")
try:
    torch.cuda.synchronize()
except torch.AcceleratorError as error:
    print(str(error).splitlines()[0])
"""


def test_an_assertion_comes_when_its_stream_comes_to_it():
    status, said = program(LATE_ASSERTION)
    assert status == 0, said
    assert said.splitlines()[:2] == ["called", "CUDA error: device-side assert triggered"]


def test_a_stream_says_that_it_is_captured_where_a_test_says_so():
    side = torch.cuda.Stream()
    for capturing in (1, 0):
        sim.sim_cuda_set_capturing(ctypes.c_void_p(side.cuda_stream), capturing)
        assert not torch.cuda.is_current_stream_capturing()
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing() == bool(capturing)
