"""Process groups over the simulated NCCL, and gloo with tensors of the devices."""

import ctypes
import os
import signal

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from simulation import program
from torch import nn


def collectives(rank):
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
        x = torch.full((1000,), rank + 1, device="cuda", dtype=dtype)
        dist.all_reduce(x)
        assert x.tolist() == [3] * 1000
    largest = torch.tensor([float(rank), -float(rank)], device="cuda")
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    assert largest.tolist() == [1, 0]
    mean = torch.tensor([float(rank)], device="cuda")
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert mean.item() == 0.5
    parts = torch.empty(2, 3, device="cuda")
    dist.all_gather_into_tensor(parts, torch.full((3,), float(rank), device="cuda"))
    assert parts.tolist() == [[0.0] * 3, [1.0] * 3]
    piece = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(piece, torch.arange(4.0, device="cuda"))
    assert piece.tolist() == [4.0 * rank, 4.0 * rank + 2]
    dist.broadcast(piece, 1)
    assert piece.tolist() == [4.0, 6.0]
    swapped = torch.empty(2, device="cuda")
    dist.all_to_all_single(swapped, torch.tensor([10.0 * rank, 10.0 * rank + 1], device="cuda"))
    assert swapped.tolist() == [float(rank), 10.0 + rank]
    apart = list(torch.empty(2, 1, device="cuda"))
    dist.all_to_all(apart, [torch.full((1,), 10.0 * rank + peer, device="cuda") for peer in (0, 1)])
    assert torch.cat(apart).tolist() == [float(rank), 10.0 + rank]


def messages(rank):
    sent = torch.full((3 << 20,), float(rank), device="cuda")  # more than sockets hold
    got = torch.empty_like(sent)
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
    )
    for request in requests:
        request.wait()
    assert got[-1].item() == 1 - rank


def model(rank):
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).cuda(), device_ids=[rank])
    wrapped(torch.ones(2, 4, device="cuda") * (rank + 1)).sum().backward()
    torch.testing.assert_close(wrapped.module.weight.grad.cpu(), torch.full((4, 4), 3.0))


def everything(rank, group):
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    assert type(backend).__name__ == group
    for part in (collectives, messages, model):
        part(rank)


needs_second = pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "ProcessGroupNCCL2"), reason="this torch has one kind alone"
)
SECOND = pytest.param("1", marks=needs_second)


@pytest.mark.parametrize(
    "second, group",
    [("0", "ProcessGroupNCCL"), pytest.param("1", "ProcessGroupNCCL2", marks=needs_second)],
)
def test_nccl_s_collectives_messages_and_ddp(second, group):
    """By torch's classic group, and by that of later versions."""
    run_ranks(everything, group, environment={"TORCH_DIST_USE_NCCL2": second})


def on_gloo(rank):
    x = torch.full((1000,), float(rank + 1), device="cuda")
    dist.all_reduce(x)
    assert x.sum().item() == 3000
    model(rank)


def test_gloo_takes_tensors_of_the_devices():
    run_ranks(on_gloo, backend="gloo")


def synchronised_batch_norm(rank):
    """Its statistics are those of all ranks' rows, its gradient that of the whole batch."""
    x = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    whole = nn.BatchNorm1d(3)
    wanted = x.clone().requires_grad_()
    expected = whole(wanted)
    expected.pow(3).sum().backward()
    rows = slice(0, 2) if rank == 0 else slice(2, 6)
    own = nn.SyncBatchNorm(3).cuda()
    given = x[rows].cuda().requires_grad_()
    out = own(given)
    out.pow(3).sum().backward()
    torch.testing.assert_close(out.detach().cpu(), expected[rows].detach())
    torch.testing.assert_close(given.grad.cpu(), wanted.grad[rows], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own.running_var.cpu(), whole.running_var)
    weight = own.weight.grad.clone()
    dist.all_reduce(weight)
    torch.testing.assert_close(weight.cpu(), whole.weight.grad, rtol=1e-4, atol=1e-4)


def test_synchronised_batch_norm_takes_the_rows_of_all_ranks():
    run_ranks(synchronised_batch_norm)


def peer_dies(rank, message):
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match=message):
        dist.all_reduce(x, async_op=True).wait()
    os._exit(0)  # the group is of no use any more


# The classic group asks NCCL for errors, and knows at once; the later one has its timeout.
@pytest.mark.parametrize(
    "second, message, timeout_s",
    [
        ("0", "remote process exited", 60),
        pytest.param("1", "timeout", 3, marks=needs_second),
    ],
)
def test_a_dead_peer_is_an_error_of_the_others(second, message, timeout_s):
    environment = {"TORCH_DIST_USE_NCCL2": second, "TORCH_NCCL_BLOCKING_WAIT": "1"}
    run_ranks(peer_dies, message, environment=environment, timeout_s=timeout_s, killed=[1])


def abort_alone(rank):
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["aborted"])
        os._exit(0)
    dist.all_reduce(x)
    assert not torch.cuda.current_stream().query()  # the other rank never joins in
    dist.distributed_c10d._abort_process_group()
    torch.cuda.synchronize()
    store.set("aborted", "")
    os._exit(0)


@pytest.mark.parametrize("second", ["0", SECOND])
def test_an_abort_ends_what_waits_for_a_peer(second):
    run_ranks(abort_alone, environment={"TORCH_DIST_USE_NCCL2": second})


def test_a_communicator_that_was_not_made_is_aborted_as_by_nccl():
    nccl = ctypes.CDLL("libnccl.so.2")
    assert nccl.ncclCommAbort(None) == 0
    assert nccl.ncclCommDestroy(None) == 0
    assert nccl.ncclCommRevoke(None, 0) == 4  # ncclInvalidArgument


TWO_DEVICES = """
import torch
from torch.cuda import nccl

xs = [torch.full((4,), i + 1.0, device=f"cuda:{i}") for i in (0, 1)]
nccl.all_reduce(xs)
print(*(x.tolist() for x in xs))
model = torch.nn.DataParallel(torch.nn.Linear(4, 1, bias=False).cuda())
model(torch.ones(6, 4, device="cuda")).sum().backward()
print(model.module.weight.grad.tolist())
"""


def test_two_devices_of_one_process_that_use_their_default_streams():
    status, said = program(TWO_DEVICES)
    assert status == 0, said
    assert said.splitlines() == [
        "[3.0, 3.0, 3.0, 3.0] [3.0, 3.0, 3.0, 3.0]",
        "[[6.0, 6.0, 6.0, 6.0]]",
    ]
