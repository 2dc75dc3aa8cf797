"""What two ranks do on devices without arithmetic: ranks_without_arithmetic.run("meeting")."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from ranks import preload, run_ranks
from torch.distributed.fsdp import fully_shard

LARGE = 1 << 30  # numbers: 4 GiB
LATE_S = 0.5


def resident_mib():
    with open("/proc/self/status") as file:
        return int(file.read().split("VmRSS:")[1].split()[0]) >> 10


def collectives(rank):
    """All of them, with more than sockets or the host hold."""
    x = torch.empty(LARGE, device="cuda")
    both = torch.empty(2 * LARGE, device="cuda")
    dist.barrier()
    before = resident_mib()
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
        dist.all_reduce(x, op)
    dist.reduce(x, 1)
    dist.broadcast(x, 1)
    dist.all_gather_into_tensor(both, x)
    dist.all_gather([torch.empty_like(x) for _ in range(2)], x)
    dist.reduce_scatter_tensor(x, both)
    dist.all_to_all_single(both, torch.empty_like(both))
    dist.all_to_all([x, torch.empty_like(x)], list(both.chunk(2)))
    for sender in (0, 1):
        (dist.send if rank == sender else dist.recv)(x, 1 - rank)
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, both[:LARGE], 1 - rank)]
    )
    for request in requests:
        request.wait()
    half = dist.new_group([0])
    if rank == 0:
        dist.all_reduce(x, group=half)
    dist.barrier()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() >= 16 << 30
    assert resident_mib() - before < 64


def known(rank):
    """What is known is moved, whenever it is asked for: integers, and few numbers. What is not makes nothing known."""
    one = torch.tensor([rank + 1], device="cuda")
    total = one.clone()
    dist.all_reduce(total)
    both = torch.empty(2, dtype=torch.long, device="cuda")
    dist.all_gather_into_tensor(both, one)
    apart = [torch.empty_like(one) for _ in range(2)]
    dist.all_gather(apart, one)
    theirs = one + 10
    dist.broadcast(theirs, 1)
    mean = torch.full((2,), float(rank), device="cuda")
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert total.tolist() == [3]
    assert [both.tolist(), [int(each) for each in apart]] == [[1, 2], [1, 2]]
    assert theirs.item() == 12
    assert mean.tolist() == [0.5, 0.5]
    objects = [None, None]
    dist.all_gather_object(
        objects, "x" * (1 + 99 * rank)
    )  # sent by more bytes than the first rank knows
    assert [len(each) for each in objects] == [1, 100]
    mixed = torch.ones(2, device="cuda") if rank == 0 else torch.randn(2, device="cuda")
    dist.all_reduce(mixed)
    assert mixed.tolist() == [0, 0]
    one.add_(1)  # after it was sent
    assert (one.item(), both.tolist()) == (rank + 2, [1, 2])


def model(rank):
    """torch's own DDP, which sends the shapes of parameters, and the order of its buckets after the first step."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
    wrapped = torch.nn.parallel.DistributedDataParallel(layers.cuda(), device_ids=[rank])
    train(wrapped)


def shards(rank):
    """FSDP gathers and reduces over one communicator on streams of its own, at the same time."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).cuda()
    for layer in layers:
        fully_shard(layer)
    train(fully_shard(layers))


def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


def seconds_of(work):
    began = time.monotonic()
    work()
    torch.cuda.synchronize()
    return time.monotonic() - began


def waits(rank):
    """Rank 0 waits for rank 1, which is late: for its part of a reduction, and for it to take what is large."""
    x = torch.empty(LARGE, device="cuda")
    dist.all_reduce(x)
    for work in (lambda: dist.all_reduce(x[:1]), lambda: dist.broadcast(x, 0)):
        torch.cuda.synchronize()
        dist.barrier()
        if rank == 1:
            time.sleep(LATE_S)
            work()
        else:
            assert seconds_of(work) > LATE_S / 2


def other_counts(rank):
    """Who expects more than the other rank sends waits for it."""
    x = torch.empty(1000 * (rank + 1), device="cuda")
    dist.all_reduce(x[:1])
    torch.cuda.synchronize()
    store = dist.group.WORLD.get_group_store()
    work = dist.all_reduce(x, async_op=True)
    if rank == 1:
        try:
            work.wait()
        except dist.DistBackendError as error:
            assert "timeout" in str(error), error
        else:
            raise AssertionError("a rank does not wait for what it expects")
        store.set("seen", "")
    store.wait(["seen"])
    os._exit(0)


def peer_dies(rank):
    x = torch.empty(1000, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(x, async_op=True).wait()
    except dist.DistBackendError as error:
        assert "remote process exited" in str(error), error
        os._exit(0)
    raise AssertionError("the other rank is gone, and nobody says so")


def meeting(rank):
    collectives(rank)
    waits(rank)


def values(rank):
    known(rank)
    model(rank)
    shards(rank)


def run(name):
    preload()
    options = {"other_counts": {"timeout_s": 3}, "peer_dies": {"killed": [1]}}.get(name, {})
    blocking = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_DIST_USE_NCCL2": "0"}
    run_ranks(getattr(sys.modules[__name__], name), environment=blocking, **options)
