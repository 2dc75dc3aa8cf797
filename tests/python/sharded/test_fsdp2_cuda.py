"""The same on devices, over NCCL and over gloo."""

import pytest
import torch
import torch.distributed as dist
from sharded_models import Fault, Kill, Trial, gradients_of, reference, worst
from tensor_models import expected_of, parallel, word_loss, words_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import brimful

two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices (torch.cuda.device_count() < 2)"
)
pytestmark = [pytest.mark.gpu, two_devices]
CLOSE = 1e-5


def on_devices(rank, backend, offload=False):
    torch.cuda.set_device(rank.index)
    group = dist.new_group(backend="nccl") if backend == "nccl" else dist.group.WORLD
    trial = Trial(rank, mesh=DeviceMesh.from_group(group, "cuda"), offload=offload)
    assert trial.sizer._device.type == "cuda"
    bad = [] if worst(trial.expected, reference((4, 4), (0, 1))) < CLOSE else ["expected"]
    bad += trial.failing_at([{at % 2: at} for at in range(5, trial.places, 37)], CLOSE)
    return bad, trial.sizer._sharded.drained


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_fault_at_an_operator_of_a_device(ranks, backend):
    for bad, drained in ranks(on_devices, backend):
        assert bad == []
        assert drained > 0


def test_shards_that_an_offload_policy_keeps_on_the_host(ranks):
    for bad, drained in ranks(on_devices, "nccl", True):
        assert bad == []
        assert drained > 0


def killed(rank):
    torch.cuda.set_device(rank.index)
    group = dist.new_group(backend="nccl")
    trial = Trial(rank, mesh=DeviceMesh.from_group(group, "cuda"))
    return trial.error_of(Kill(60) if rank.index == 1 else Fault(-1))


def test_a_rank_that_is_killed(ranks):
    (error, _, waited), _ = ranks(killed, lost=(1,))
    assert error == "RankFailed"
    assert waited < 8


def halves_on_devices(rank, backend):
    torch.cuda.set_device(rank.index)
    group = dist.new_group(backend="nccl") if backend == "nccl" else dist.group.WORLD
    mesh = DeviceMesh.from_group(group, "cuda", mesh_dim_names=("tensor",))
    model = parallel(mesh=mesh)
    batch = [t.to("cuda") for t in words_of(4, 0)]
    trial = Trial(rank, model=model, batch=batch, loss=word_loss, mesh=mesh)
    bad = [] if worst(trial.expected, expected_of([words_of(4, 0)])) < CLOSE else ["expected"]
    bad += trial.failing_at([{at % 2: at} for at in range(5, trial.places, 71)], CLOSE)
    return bad, trial.sizer._sharded.drained


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_tensor_parallelism(ranks, backend):
    for bad, drained in ranks(halves_on_devices, backend):
        assert bad == []
        assert drained > 0


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm = nn.SyncBatchNorm(6, track_running_stats=False)

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x))))


def normed_over_ranks(rank):
    """Pieces of which each is normed over both ranks."""
    torch.cuda.set_device(rank.index)
    torch.manual_seed(0)
    model = Normed().to("cuda")
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=init_device_mesh("cuda", (2,)))
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank.index)).to("cuda")

    def loss(m, piece):
        Fault.in_pieces = True
        return m(piece).square().mean()

    sizer = brimful.BatchSizer(model, pieces=2)
    sizer.step(batch, loss)
    model.zero_grad()
    with Fault(-1) as counter:
        sizer.step(batch, loss)
    expected = gradients_of(model)
    state, bad = sizer.state_dict(), []
    for at in range(3, counter.count, 23):
        rank.progress()
        for _ in range(2):  # in the first one in the pieces that were agreed on
            model.zero_grad()
            sizer.load_state_dict(state)
            sizer.step(batch, loss)
        again = worst(gradients_of(model), expected)
        model.zero_grad()
        with Fault(at if rank.index == at % 2 else -1):
            outcome = sizer.step(batch, loss)
        bad += [(at, outcome.split, again)] * (outcome.split != [2] * 4 or again > CLOSE)
    return bad, sizer._sharded.drained


def test_batch_norms_over_ranks(ranks):
    for bad, drained in ranks(normed_over_ranks):
        assert bad == []
        assert drained > 0
