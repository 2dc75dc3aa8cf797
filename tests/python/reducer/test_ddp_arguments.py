"""Arguments of torch's class: taken, without effect, or refused with a remedy; and what construction makes equal."""

import inspect
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ddp_reference import (
    mean_gradients,
    require_gradients,
    require_same_everywhere,
    small_net,
    train_once,
    wrap,
)
from models import same_bits, values_of
from rank_processes import raised
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import brimful
from brimful.reducer._whole_path import whole_path

HARMLESS = [
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"check_reduction": True},
    {"skip_all_reduce_unused_params": True},
    {"batched_grad_copy": True},
    {"lazy_bucket_allocation": True},
    {"dim": 1},
    {"init_sync": False},
    {"device_ids": None},
    {"device_ids": []},
    {"output_device": None},
    {"bucket_cap_mb_list": [0.0001, 0.0005]},
    {"forward_sync_buffers": True},
    {"broadcast_buffers": True},
]


def test_every_argument_of_torchs_class_is_taken_in_its_place():
    theirs = inspect.signature(DistributedDataParallel.__init__).parameters
    ours = inspect.signature(brimful.DistributedDataParallel.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name


def harmless_job(rank):
    expected = mean_gradients(small_net(), rank.size, train_once)
    mesh = init_device_mesh("cpu", (rank.size,))
    net = small_net()
    delayed = {
        "delay_all_reduce_named_params": [("0.weight", net[0].weight)],
        "param_to_hook_all_reduce": net[0].bias,
    }
    for options in [*HARMLESS, {"device_mesh": mesh}, delayed]:
        model = brimful.DistributedDataParallel(
            net if options is delayed else small_net(), **options
        )
        for _ in range(2):
            train_once(model, rank.index)
            require_gradients(model, expected)
            model.zero_grad()


def test_arguments_without_effect_leave_the_gradients_alone(ranks):
    ranks(harmless_job)


def caps_job(rank):
    def buckets(**options):
        return brimful.DistributedDataParallel(small_net(), **options).reducer.buckets

    return [
        buckets(),
        buckets(bucket_cap_mb=0.00001),
        buckets(bucket_cap_mb_list=[0.00001]),
        buckets(bucket_cap_mb_list=[0.00001, 1]),
        buckets(bucket_cap_mb=0.00001, bucket_cap_mb_list=[1]),
    ]


def test_bucket_caps_say_how_many_buckets_there_are(ranks):
    assert ranks(caps_job, size=1) == [[1, 4, 4, 2, 1]]


def caps_list_job(rank, caps):
    torch.manual_seed(1)
    sizes = [3, 40, 7, 90, 20, 11, 64, 5]  # in the order of use, as of registration
    net = torch.nn.ModuleList(torch.nn.Linear(size, 30, bias=False) for size in sizes)
    model = wrap(net, bucket_cap_mb=None, bucket_cap_mb_list=caps)
    plans = [json.loads(model.plan)]
    for _ in range(3):
        sum(layer(torch.ones(1, layer.in_features)).sum() for layer in net).backward()
        model.zero_grad()
    plans.append(json.loads(model.plan))
    weights = list(net.parameters())
    limits = [int(mb * 2**20) for mb in caps]
    theirs, _ = dist._compute_bucket_assignment_by_size(weights[::-1], limits)
    return plans, [[len(sizes) - 1 - i for i in bucket] for bucket in theirs]


@pytest.mark.parametrize("caps", [[0.02], [0.005, 0.02], [0.02, 0.001, 0.012], [1e-6, 1, 1e-6]])
def test_a_list_of_caps_is_taken_entry_by_entry_as_in_torch(ranks, caps):
    for plans, theirs in ranks(caps_list_job, caps, size=1):
        assert plans == [theirs, theirs]


def refused_job(rank):
    mesh = init_device_mesh("cpu", (1, rank.size))
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3))
    meta = torch.nn.Linear(2, 2, device="meta")
    in_backward = small_net()
    in_backward[0].weight._in_backward_optimizers = []
    ddp = brimful.DistributedDataParallel
    parameter = small_net()[0].weight
    return [
        raised(ddp, small_net(), delay_all_reduce_named_params=[("0.weight", parameter)]),
        raised(ddp, small_net(), param_to_hook_all_reduce=parameter),
        raised(ddp, small_net(), device_mesh=mesh),
        raised(ddp, small_net(), device_mesh=mesh, process_group=dist.group.WORLD),
        raised(ddp, small_net(), device_ids=[0]),
        raised(ddp, small_net(), output_device=0),
        raised(ddp, small_net(), device_ids=[0, 1]),
        raised(ddp, lazy),
        raised(ddp, meta),
        raised(ddp, in_backward),
    ]


REFUSED = [
    (ValueError, "param_to_hook_all_reduce: none); pass both, or neither"),
    (ValueError, "(delay_all_reduce_named_params: none, "),
    (ValueError, "pass a mesh of one dimension"),
    (ValueError, "pass one of them"),
    (ValueError, "(device_ids: [0], output_device: None, devices: ['cpu']); leave them out"),
    (ValueError, "(device_ids: None, output_device: 0, devices: ['cpu']); leave them out"),
    (ValueError, "(device_ids: [0, 1]); start one process per device"),
    (ValueError, "(name: 0.weight); run a forward"),
    (ValueError, "(name: weight); call module.to_empty"),
    (NotImplementedError, "(parameter: 0.weight); call optimizer.step() after backward"),
]


def test_what_is_refused_has_a_remedy(ranks):
    for errors in ranks(refused_job):
        for error, (kind, words) in zip(errors, REFUSED, strict=True):
            assert type(error) is kind, (words, error)
            assert words in str(error)


class Parts(torch.nn.Module):
    """A trainable and a frozen parameter, a buffer, and one of each that may be ignored; all different by rank."""

    def __init__(self, rank):
        super().__init__()
        for name in ("weight", "frozen", "own_weight", "own_frozen"):
            self.register_parameter(name, torch.nn.Parameter(torch.full((3,), 1.0 + rank)))
        self.register_buffer("state", torch.full((2,), 1.0 + rank))
        self.register_buffer("own_state", torch.full((2,), 1.0 + rank))
        self.frozen.requires_grad_(False)
        self.own_frozen.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.state += x.sum()
            self.own_state += x.sum()
        return (self.weight + self.frozen + self.own_weight * 2 + self.own_frozen).sum() * x.sum()


def parts_job(rank, options, ignored):
    module = Parts(rank.index)
    if ignored:
        brimful.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            module, ["own_weight", "own_frozen", "own_state"]
        )
    before = values_of(module)
    model = wrap(module, **options)
    at_start = values_of(module)
    x = torch.full((2,), 1.0 + rank.index)
    model(x).backward()
    return before, at_start, values_of(module), {n: p.grad for n, p in module.named_parameters()}


def differing(results, moment):
    """Names of what the ranks do not have in common."""
    first, second = (result[moment] for result in results)
    return [name for name in first if not torch.equal(first[name], second[name])]


EVERYTHING = ["weight", "frozen", "own_weight", "own_frozen", "state", "own_state"]
BUFFERS = ["state", "own_state"]


@pytest.mark.parametrize(
    ("options", "at_start", "after_step"),
    [
        ({}, [], []),
        ({"init_sync": False}, EVERYTHING, EVERYTHING[:4]),
        ({"broadcast_buffers": False}, BUFFERS, BUFFERS),
        ({"forward_sync_buffers": False}, [], BUFFERS),
        ({"forward_sync_buffers": True, "broadcast_buffers": False}, [], []),
    ],
)
def test_construction_and_steps_make_equal_what_they_should(ranks, options, at_start, after_step):
    results = ranks(parts_job, options, False)
    assert differing(results, 0) == EVERYTHING
    assert differing(results, 1) == at_start
    assert differing(results, 2) == after_step
    for _, start, _, gradients in results:
        assert gradients["weight"].tolist() == [3, 3, 3]
        assert at_start or same_bits(start, results[0][0])  # rank 0's


def test_what_the_module_names_as_ignored_stays_each_ranks_own(ranks):
    results = ranks(parts_job, {}, True)
    own = [name for name in EVERYTHING if name.startswith("own")]
    assert differing(results, 1) == differing(results, 2) == own
    for rank, (*_, gradients) in enumerate(results):
        assert gradients["weight"].tolist() == [3, 3, 3]
        assert gradients["own_weight"].tolist() == [4 * (rank + 1)] * 3  # nobody's mean


class WithFrozen(torch.nn.Module):
    def __init__(self, frozen, buffer):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.frozen = torch.nn.Parameter(torch.zeros(frozen), requires_grad=False)
        self.register_buffer("state", torch.zeros(buffer))


def mismatch_job(rank, frozen, buffer):
    error = raised(wrap, WithFrozen(frozen[rank.index], buffer[rank.index]))
    wrap(WithFrozen(1, 1))  # the group still works
    return error


@pytest.mark.parametrize(
    ("frozen", "buffer", "words"),
    [
        ((2, 3), (1, 1), "on rank 0 frozen parameter 0 is [2] Float, on rank 1 frozen parameter 0"),
        ((2, 2), (1, 2), "on rank 0 buffer 0 is [1] Float, on rank 1 buffer 0 is [2] Float"),
    ],
)
def test_frozen_parameters_and_buffers_that_differ_are_refused(ranks, frozen, buffer, words):
    for error in ranks(mismatch_job, frozen, buffer):
        assert type(error) is brimful.PlanMismatch and words in str(error), error


TORCHS_ATTRIBUTES = (
    "broadcast_buffers",
    "device",
    "device_ids",
    "device_type",
    "dim",
    "find_unused_parameters",
    "forward_sync_buffers",
    "mixed_precision",
    "output_device",
    "parameters_to_ignore",
    "process_group",
    "require_backward_grad_sync",
    "static_graph",
)


def attributes_job(rank):
    page = (Path(__file__).parents[3] / "docs/migration/torch-ddp.md").read_text()
    theirs = DistributedDataParallel(small_net())
    of_torch = set(dir(theirs)) - set(dir(theirs.module))
    missing = {n for n in of_torch if n[0] != "_" and not hasattr(wrap(small_net()), n)}
    assert {name for name in missing if f"`{name}`" not in page} == set()
    for options in ({}, {"find_unused_parameters": True}, {"broadcast_buffers": False}):
        ours, theirs = wrap(small_net(), **options), DistributedDataParallel(small_net(), **options)
        for name in TORCHS_ATTRIBUTES:
            assert getattr(ours, name) == getattr(theirs, name), name
    model = wrap(small_net())
    assert model.require_backward_grad_sync
    with model.no_sync():
        assert not model.require_backward_grad_sync
    model.require_backward_grad_sync = False
    train_once(model, rank.index)
    local = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model.require_backward_grad_sync = True
    model._set_static_graph()
    train_once(model, rank.index)
    require_same_everywhere(rank, {n: p.grad for n, p in model.named_parameters()})
    return local


def test_synchronisation_can_be_switched_by_torchs_attribute(ranks):
    first, second = ranks(attributes_job)
    assert not same_bits(first, second)


def single_rank_job(rank):
    def launches():
        model = brimful.DistributedDataParallel(small_net())
        train_once(model, 0)
        return model.reducer.counters.launches

    assert launches() == 0
    with whole_path():
        assert launches() > 0
    assert launches() == 0
    with pytest.raises(TypeError, match="whole_path"):
        brimful.DistributedDataParallel(small_net(), whole_path=True)


def test_a_single_rank_makes_collectives_only_to_be_measured(ranks):
    ranks(single_rank_job, size=1)
