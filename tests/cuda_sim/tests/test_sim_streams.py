"""Streams and events: with a delay, what no event orders is seen out of order."""

import pytest
import torch
from simulation import MIB, set_delay


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
def test_a_stream_that_waits_for_no_event_sees_old_values(waits):
    set_delay(20_000)
    side = torch.cuda.Stream()
    source = torch.full((MIB,), 3.0, pin_memory=True)
    y = torch.zeros(MIB, device="cuda")
    torch.cuda.synchronize()
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
