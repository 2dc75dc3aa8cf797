"""A device that is lost in a step: the error that the program sees is the one that lost it."""

import ctypes
import itertools
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from lost_ranks import CLEAN_UP_ONLY, KINDS, at_once, train
from models import classes, dropout_net, wrap
from rank_processes import raised
from torch import nn

import brimful

pytestmark = pytest.mark.gpu
ILLEGAL_ADDRESS = 700
SOON_S = 5


def simulated(name):
    """A function of the simulated device; None on a real one."""
    return getattr(ctypes.CDLL(None), name, None)


simulation = simulated("sim_cuda_plant_error")


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


def lost_device_job(rank, kind, with_sizer, raises):
    """Rank 1's device is lost in backward, in a hook that raises, or that does not notice."""
    group, device, options = None, 0, {}
    if kind == "gloo":
        # One bucket: torch ends a process whose device is lost while gloo's thread copies one back.
        options["bucket_cap_mb"] = 25
    else:
        os.environ.update(
            CLEAN_UP_ONLY, TORCH_DIST_USE_NCCL2=KINDS[kind], TORCH_NCCL_RETHROW_CUDA_ERRORS="0"
        )
        device = rank.index
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl")
    model = wrap(dropout_net().cuda(), process_group=group, **options)
    sizer = brimful.BatchSizer(model) if with_sizer else None
    step = 0

    def lose(_):
        if rank.index == 1 and step == 2:
            simulated("sim_cuda_plant_error")(device, ILLEGAL_ADDRESS)
            if raises:
                raise Lost("by the program")

    model.module[0].weight.register_hook(lose)
    for step in range(3):
        batch = [t.cuda() for t in classes(8, seed=step)]
        error = raised(train, model, sizer, batch)
        if error is not None:
            kept.append(
                (model, sizer)
            )  # torch's tensors on a lost device may end the process with theirs
            return step, error
        model.zero_grad()
    return None


kept = []


@pytest.mark.parametrize("kind", ["gloo", *KINDS])
def test_a_rank_whose_device_is_lost_raises_its_own_error_and_the_other_names_it(ranks, lose, kind):
    if kind != "gloo" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices (torch.cuda.device_count() < 2)")

    def run(with_sizer, raises):
        results = ranks(lost_device_job, kind, with_sizer, raises, timeout_s=40, watchdog_s=60)
        (step, other), (own_step, own) = results
        assert (step, own_step) == (2, 2), results
        if raises:
            assert type(own) is Lost, own
        else:
            assert type(own) is torch.AcceleratorError, own
            assert "illegal memory access" in str(own), own
        assert type(other) is brimful.RankFailed, other
        assert other.rank == 1, other
        assert other.seconds < SOON_S, (other.seconds, other)

    at_once([partial(run, *how) for how in itertools.product((True, False), repeat=2)])


@pytest.fixture
def set_capturing():
    found = simulated("sim_cuda_set_capturing")
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


def capturing_job(rank):
    model = brimful.DistributedDataParallel(net())
    x = torch.randn(16, 8, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        simulated("sim_cuda_set_capturing")(ctypes.c_void_p(stream.cuda_stream), 1)
        refused = raised(model, x)
        with torch.no_grad():
            model(x)
        simulated("sim_cuda_set_capturing")(ctypes.c_void_p(stream.cuda_stream), 0)
        model(x).square().mean().backward()
        torch.cuda.synchronize()
    return refused


def test_a_step_of_a_wrapped_model_is_not_captured_into_a_graph(ranks, set_capturing):
    """In a plain loop; a forward without gradients is no step."""
    (refused,) = ranks(capturing_job, size=1)
    assert isinstance(refused, RuntimeError)
    words = "a step of a wrapped model cannot be captured into a CUDA graph (device: cuda:0)"
    assert words in str(refused)


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
