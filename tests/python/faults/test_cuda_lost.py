"""A device that is lost in a step: the error that the program sees is the one that lost it."""

import ctypes

import pytest
import torch
from torch import nn

import brimful

pytestmark = pytest.mark.gpu
ILLEGAL_ADDRESS = 700
simulation = getattr(ctypes.CDLL(None), "sim_cuda_plant_error", None)


@pytest.fixture
def lose():
    if simulation is None:
        pytest.skip("plants its error in the simulated device")
    yield lambda: simulation(0, ILLEGAL_ADDRESS)
    simulation(0, 0)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).cuda()


class Lost(Exception):
    pass


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_sizers_step_raises_the_programs_own_error(lose, at):
    model = net()
    sizer = brimful.BatchSizer(model, torch.optim.Adam(model.parameters()))
    x = torch.randn(16, 8, device="cuda")
    sizer.step(x, lambda m, p: m(p).square().mean())
    model.zero_grad()

    def fail(_):
        lose()
        raise Lost("by the program")

    def loss_fn(m, p):
        out = m(p)
        if at == "forward":
            fail(out)
        out.register_hook(fail)
        return out.square().mean()

    with pytest.raises(Lost, match="by the program"):
        sizer.step(x, loss_fn)


def test_a_pipelines_step_raises_the_programs_own_error(lose):
    calls = []

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            calls.append(len(x))
            if len(calls) == 7:
                lose()
                raise Lost("by the program")
            return self.inner(x)

    pipe = brimful.Pipeline(
        [Fails()], devices=["cuda:0"], microbatches=4, loss_fn=lambda a, b: (a - b).square().mean()
    )
    x, y = torch.randn(16, 8, device="cuda"), torch.randn(16, 4, device="cuda")
    pipe.step(x, y)
    with pytest.raises(Lost, match="by the program"):
        pipe.step(x, y)


def test_a_step_on_a_lost_device_raises_its_error(lose):
    model = net()
    x = torch.randn(16, 8, device="cuda")
    lose()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        brimful.BatchSizer(model).step(x, lambda m, p: m(p).square().mean())


def test_an_error_of_the_device_keeps_its_type_and_its_code(lose):
    lose()
    with pytest.raises(torch.AcceleratorError, match="illegal memory access") as caught:
        brimful.memory.release_cached("cuda")
    assert caught.value.error_code == ILLEGAL_ADDRESS


@pytest.fixture
def set_capturing():
    found = getattr(ctypes.CDLL(None), "sim_cuda_set_capturing", None)
    if found is None:
        pytest.skip("a stream of the simulated device says that it is captured")
    return found


def test_a_step_is_not_captured_into_a_graph(set_capturing):
    sizer = brimful.BatchSizer(net())
    x = torch.randn(16, 8, device="cuda")
    stream = torch.cuda.Stream()
    handle = ctypes.c_void_p(stream.cuda_stream)
    with torch.cuda.stream(stream):
        set_capturing(handle, 1)
        with pytest.raises(
            RuntimeError, match=r"cannot be captured into a CUDA graph \(device: cuda:0\)"
        ):
            sizer.step(x, lambda m, p: m(p).square().mean())
        set_capturing(handle, 0)
        sizer.step(x, lambda m, p: m(p).square().mean())


def test_a_step_of_a_pipeline_is_not_captured_into_a_graph(set_capturing):
    """On any of its devices: the current one is another."""
    pipe = brimful.Pipeline(
        [nn.Linear(8, 8).cuda(0), nn.Linear(8, 4).cuda(1)],
        devices=["cuda:0", "cuda:1"],
        microbatches=2,
        loss_fn=lambda a, b: (a - b).square().mean(),
    )
    x, y = torch.randn(16, 8, device="cuda:0"), torch.randn(16, 4, device="cuda:1")
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
    handle = ctypes.c_void_p(stream.cuda_stream)
    with torch.cuda.stream(stream), torch.cuda.device(0):
        set_capturing(handle, 1)
        with pytest.raises(
            RuntimeError,
            match=r"a step of a pipeline cannot be captured into a CUDA graph \(device: cuda:1\)",
        ):
            pipe.step(x, y)
        set_capturing(handle, 0)
        pipe.step(x, y)
