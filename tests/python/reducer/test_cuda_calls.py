"""What a step asks of a device beside the model's own work, and that gradients which are copied together are right."""

import copy
import ctypes
import json
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from models import gradients_of, relative_difference
from torch import nn
from torch.utils.checkpoint import checkpoint

import brimful
from brimful.reducer._whole_path import whole_path

two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices (torch.cuda.device_count() < 2)"
)
pytestmark = [pytest.mark.gpu, two_devices]
MIB = 1 << 20
simulation = ctypes.CDLL(None)
simulated = hasattr(simulation, "sim_cuda_calls")
counted = pytest.mark.skipif(not simulated, reason="only the simulated device counts")
COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync", "cudaLaunchKernel", "operator")
RECORDS = ("cudaEventRecord", "cudaEventRecordWithFlags")
WAITS = ("cudaStreamWaitEvent",)
SETTLED, COUNTED = 12, 16  # steps


def calls(names):
    simulation.sim_cuda_calls.restype = ctypes.c_long
    return sum(simulation.sim_cuda_calls(name.encode()) for name in names)


def on_device(rank):
    torch.cuda.set_device(rank.index)
    torch.manual_seed(0)
    return dist.new_group(backend="nccl")


def difference(model, expected):
    """Of gradients, relative; those that are None are so on both sides."""
    own = gradients_of(model)
    assert {name for name in own if own[name] is None} == {
        name for name in expected if expected[name] is None
    }
    names = [name for name in own if own[name] is not None]
    return relative_difference(
        {name: own[name].cpu() for name in names}, {name: expected[name] for name in names}
    )


def wrapped(module, group, **options):
    with whole_path():
        return brimful.DistributedDataParallel(module, process_group=group, **options)


def torchs(module, group):
    return nn.parallel.DistributedDataParallel(
        module, device_ids=[torch.cuda.current_device()], process_group=group
    )


def small_layers(count, norms):
    layers = [
        nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16) if norms else nn.Identity())
        for _ in range(count)
    ]
    return nn.Sequential(*layers).cuda()


def step_of(model, x):
    def step():
        model(x).square().mean().backward()
        model.zero_grad()

    return step


def counts(step, settled, steps, **names):
    for _ in range(settled):
        step()
    torch.cuda.synchronize()
    before = {name: calls(of) for name, of in names.items()}
    for _ in range(steps):
        step()
    return {name: (calls(of) - before[name]) / steps for name, of in names.items()}


def copies_job(rank, norms):
    group = on_device(rank)
    x = torch.randn(8, 16, device="cuda")
    bare = counts(step_of(small_layers(30, norms), x), 3, 1, copies=COPIES)["copies"]
    model = wrapped(small_layers(30, norms), group)
    return counts(step_of(model, x), 3, 1, copies=COPIES)["copies"] - bare


@counted
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_and_buffers_are_copied_together(ranks, size, norms):
    for copies in ranks(copies_job, norms, size=size):
        assert copies <= (4 if size == 1 else 16 + 8 * norms)


def events_job(rank):
    group = on_device(rank)
    x = torch.randn(8, 16, device="cuda")
    found = []
    for wrap in (wrapped, torchs):
        step = step_of(wrap(small_layers(10, False), group), x)
        found.append(counts(step, SETTLED, COUNTED, records=RECORDS, waits=WAITS))
    return found


@counted
def test_a_step_records_hardly_more_events_than_torchs(ranks):
    for ours, torchs_own in ranks(events_job):
        assert ours["records"] <= torchs_own["records"] + 2
        assert ours["waits"] <= torchs_own["waits"] + 2


class Wide(nn.Module):
    """Gradients of more than 4 MiB between small ones: 17 MiB in all."""

    def __init__(self):
        super().__init__()
        self.wide = nn.ModuleList([nn.Linear(1100, 1000) for _ in range(4)])
        self.small = nn.ModuleList([nn.Linear(1000, 1100) for _ in range(3)])

    def forward(self, x):
        for wide, small in zip(self.wide, self.small, strict=False):
            x = nn.functional.linear(wide(x), small.weight[:, :1000], small.bias)
        return self.wide[-1](x)


def collectives_job(rank):
    group = on_device(rank)
    x = torch.randn(4, 1100, device="cuda")
    backend = group._get_backend(torch.device("cuda"))
    found = []
    for wrap in (wrapped, torchs):
        model = wrap(Wide().cuda(), group)
        step = step_of(model, x)
        made = []
        for _ in range(30):
            before = backend._get_sequence_number_for_group()
            step()
            made.append(backend._get_sequence_number_for_group() - before)
        found.append((max(made[2:]), made))
        del model, step
    return found


def test_a_step_makes_no_more_collectives_than_torchs(ranks):
    for (ours, by_step), (torchs_own, theirs) in ranks(collectives_job):
        assert ours <= torchs_own, (by_step, theirs)


def resnet_50_sizes():
    """Elements of its parameters, in their order."""

    def convolution(into, out, kernel):
        return [into * out * kernel**2, out, out]

    sizes, into = convolution(3, 64, 7), 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            sizes += convolution(into, width, 1) + convolution(width, width, 3)
            sizes += convolution(width, 4 * width, 1)
            sizes += convolution(into, 4 * width, 1) if block == 0 else []
            into = 4 * width
    return [*sizes, into * 1000, 1000]


def resnet_job(rank):
    group = on_device(rank)
    sizes = resnet_50_sizes()
    assert sum(sizes) == 25_557_032
    net = nn.ParameterList([torch.zeros(size, device="cuda") for size in sizes])
    return len(json.loads(wrapped(net, group).plan))


def test_a_resnet_50_makes_no_more_collectives_than_torchs(ranks):
    assert max(ranks(resnet_job, size=1)) <= 5  # 1 MiB, then 25 MiB each


class Net(nn.Module):
    """Layouts, dtypes and a layer that may not be used."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.pixel = nn.Conv2d(8, 4, 1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.last = nn.Linear(6, 6)
        self.spare = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.randn(6, dtype=torch.float64))

    def forward(self, x, spare=True):
        x = self.pixel(self.convolution(x).relu()).mean((2, 3)) @ self.turned
        x = self.last(x) * self.scale
        return self.spare(x.float()) if spare else x.float()


def images(rank, number):
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(4, 3, 8, 8, generator=generator)


def mean_gradients(net, size, passes):
    """Of all ranks' losses, on the CPU. `passes`: number and whether the spare layer is used, by backward."""
    reference = copy.deepcopy(net).cpu()
    for number, spare in passes:
        for rank in range(size):
            (reference(images(rank, number), spare).square().mean() / size).backward()
    return gradients_of(reference)


def gradients_job(rank, options, passes):
    group = on_device(rank)
    net = Net()
    expected = mean_gradients(net, rank.size, passes)
    options = {"find_unused_parameters": True, **options}
    model = brimful.DistributedDataParallel(net.cuda(), process_group=group, **options)
    worst = []
    for _ in range(3):
        for place, (number, spare) in enumerate(passes):
            with nullcontext() if place == len(passes) - 1 else model.no_sync():
                x = images(rank.index, number).cuda()
                model(x, spare).square().mean().backward()
        worst.append(difference(model, expected))
        for parameter in net.parameters():
            assert parameter.grad is None or parameter.grad.stride() == parameter.stride()
        model.zero_grad()
    return max(worst)


@pytest.mark.parametrize(
    "options, bound",
    [
        ({}, 1e-5),
        ({"bucket_cap_mb": 0.0005}, 1e-5),
        ({"gradient_predivide_factor": 1.0}, 1e-5),
        ({"wire_dtype": torch.bfloat16}, 2e-2),
        ({"wire_dtype": torch.bfloat16, "error_feedback": True}, 2e-2),
    ],
)
@pytest.mark.parametrize(
    "passes",
    [
        [(0, True)],
        [(0, True), (1, True), (2, True)],
        [(0, True), (1, False)],
        [(0, False), (1, True)],
        [(0, False), (1, False)],
    ],
)
def test_gradients_are_the_mean(ranks, options, bound, passes):
    for worst in ranks(gradients_job, options, passes):
        assert worst < bound


def other_strides_job(rank):
    group = on_device(rank)
    net = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
    reference = copy.deepcopy(net)
    model = brimful.DistributedDataParallel(net.cuda(), process_group=group)
    x = torch.randn(4, 6)
    reference(x).square().mean().backward()
    net[1].weight.grad = torch.zeros(6, 6, device="cuda").t()
    model(x.cuda()).square().mean().backward()
    assert net[1].weight.grad.stride() == (6, 1)
    return difference(model, gradients_of(reference))


def test_a_gradient_of_other_strides_is_copied_by_itself(ranks):
    assert max(ranks(other_strides_job)) < 1e-6


def graph_job(rank):
    group = on_device(rank)
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    reference = copy.deepcopy(net)
    model = brimful.DistributedDataParallel(net.cuda(), process_group=group)
    x = torch.randn(4, 6)
    for module, at in ((reference, x), (model, x.cuda())):
        module(at).square().mean().backward(create_graph=True)
        penalty = sum(parameter.grad.square().sum() for parameter in module.parameters())
        module.zero_grad()
        penalty.backward()
    return difference(model, gradients_of(reference))


@pytest.mark.filterwarnings("ignore:Using backward.*create_graph")
def test_gradients_with_a_graph(ranks):
    assert max(ranks(graph_job)) < 1e-5


class Twice(nn.Module):
    """A layer whose gradient comes twice, between those of others."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=True))
        return self.other(x)


def second_arrival_job(rank, size_of_pass):
    group = on_device(rank)
    net = Twice()
    reference = copy.deepcopy(net)
    model = brimful.DistributedDataParallel(net.cuda(), process_group=group)
    x = torch.randn(4, 3)
    worst = 0.0
    for _ in range(3):
        for place in range(size_of_pass):
            last = place == size_of_pass - 1
            reference(x.clone().requires_grad_()).square().mean().backward()
            with nullcontext() if last else model.no_sync():
                model(x.cuda().requires_grad_()).square().mean().backward()
        worst = max(worst, difference(model, gradients_of(reference)))
        for module in (model, reference):
            module.zero_grad()
    return worst


@pytest.mark.parametrize("size_of_pass", [1, 2])
def test_a_gradient_that_comes_twice(ranks, size_of_pass):
    assert max(ranks(second_arrival_job, size_of_pass)) < 1e-5


class InTwoStreams(nn.Module):
    """Two branches. The gradients of one come in a stream of its own, and first."""

    def __init__(self):
        super().__init__()
        self.here, self.there = nn.Linear(64, 64), nn.Linear(64, 64)
        self.side, self.on_backward = None, lambda _: None

    def to_streams(self):
        self.cuda()
        self.side = torch.cuda.Stream()
        with torch.cuda.stream(self.side):
            for parameter in self.there.parameters():
                parameter.sink = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        return self

    def forward(self, x):
        here = self.here(x)
        if self.side is None:
            return here + self.there(x)
        here.register_hook(lambda gradient: self.on_backward(gradient))
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            there = self.there(x)
        torch.cuda.current_stream().wait_stream(self.side)
        return here + there


def hold(stream):
    simulation.sim_cuda_hold(ctypes.c_void_p(stream.cuda_stream))


def streams_job(rank, held):
    group = on_device(rank)
    net, reference, x = InTwoStreams(), InTwoStreams(), torch.randn(4, 64)
    reference.load_state_dict(net.state_dict())
    reference(x).square().mean().backward()
    model = brimful.DistributedDataParallel(net.to_streams(), process_group=group)
    main, x, worst = torch.cuda.current_stream(), x.cuda(), 0.0
    if held == "main":  # from where its own branch begins
        net.on_backward = lambda _: hold(main)
    for _ in range(3):
        loss = model(x).square().mean()
        torch.cuda.synchronize()
        if held == "side":
            hold(net.side)
        with model.no_sync():
            loss.backward()
        with torch.cuda.stream(
            net.side
        ):  # in memory that was given back too early, if there is some
            junk = [torch.full((size,), 1e9, device="cuda") for size in (64, 64 * 64) * 4]
        torch.cuda.synchronize()
        worst = max(worst, difference(model, gradients_of(reference)))
        model.zero_grad()
        del junk
    return worst


@pytest.mark.skipif(not simulated, reason="holds a stream")
@pytest.mark.parametrize("held", ["side", "main"])
def test_gradients_of_several_streams(ranks, held):
    assert max(ranks(streams_job, held)) < 1e-5


def peak_of(model):
    x, peaks = torch.randn(1, 512, device="cuda"), []
    for _ in range(3):
        loss = model(x).square().mean()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        model.zero_grad()
        del loss
    return max(peaks)


def bytes_job(rank):
    group = on_device(rank)

    def layers(count):  # of a MiB each
        return nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(count)]).cuda()

    bare = peak_of(layers(1))
    model = brimful.DistributedDataParallel(layers(72), process_group=group, bucket_cap_mb=1000)
    return (peak_of(model) - bare) / MIB


def test_gradients_that_wait_take_a_bounded_part_of_memory(ranks):
    for peak in ranks(bytes_job):
        assert peak < 32 + 2
