"""Models that fully_shard has sharded, and faults at each of their operators."""

import os
import random
import signal
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import seed
from rank_processes import raised
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import brimful

WORDS, WIDTH, TOKENS = 13, 8, 4


class Block(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.recompute = recompute

    def mix(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v))

    def forward(self, x):
        return checkpoint(self.mix, x, use_reentrant=False) if self.recompute else self.mix(x)


class Net(nn.Module):
    """An embedding, attention, a buffer that changes, a frozen part, and a module that is called twice."""

    def __init__(self, recompute=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        self.seen += 1
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        x = torch.tanh(self.twice(torch.tanh(self.twice(x)))) + self.frozen(x)
        return self.head(self.norm(x))


def sharded(
    *,
    recompute=False,
    mesh=None,
    half=False,
    reshard=True,
    prefetch=False,
    compiled=False,
    offload=False,
):
    seed(0)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    net = Net(recompute).to(mesh.device_type)
    if compiled:
        for block in net.blocks:
            block.compile()
    how = {"mesh": mesh}
    how["reshard_after_forward"] = reshard
    if offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if half:
        how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in (net.embed, *net.blocks, net.frozen, net.twice):
        fully_shard(part, **how)
    fully_shard([net.norm, net.head], **how)
    fully_shard(net, **how)
    if prefetch:
        net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1]])
        net.blocks[1].set_modules_to_backward_prefetch([net.blocks[0]])
    return net


def batch_of(rows, number):
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(WORDS, (rows, TOKENS + 1), generator=generator)
    return words[:, :-1], words[:, 1:]


def loss_fn(model, piece):
    Fault.in_pieces = True
    words, following = piece
    return F.cross_entropy(model(words).flatten(0, 1), following.flatten())


def gradients_of(model):
    """Whole ones, by name; a collective."""
    return {
        name: _whole(p.grad, p).cpu()
        for name, p in model.named_parameters()
        if p.requires_grad and p.grad is not None
    }


def _whole(gradient, p):
    mesh = getattr(p, "device_mesh", None)
    return gradient.clone() if mesh is None else gradient.to(mesh.device_type).full_tensor()


def on_one_host(make, batches, loss, times=1):
    """Gradients of all rows."""
    seed(0)
    net = make()
    batch = [torch.cat(tensors) for tensors in zip(*batches, strict=True)]
    for _ in range(times):
        loss(net, batch).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def reference(rows_by_rank, numbers, times=1):
    batches = [batch_of(rows, n) for rows, n in zip(rows_by_rank, numbers, strict=True) if rows]
    return on_one_host(Net, batches, loss_fn, times)


def worst(found, expected):
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


class Fault(TorchDispatchMode):
    """Raises at operator number `at` of a step's pieces, forward and backward; counts them all if that is -1."""

    in_pieces = False

    def __init__(self, at, error=torch.OutOfMemoryError):
        super().__init__()
        self.at, self.error, self.count = at, error, 0
        Fault.in_pieces = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        counts = Fault.in_pieces and func.namespace != "c10d"
        if (
            func is torch.ops.aten._local_scalar_dense.default
        ):  # after the loss is read come the hosts
            Fault.in_pieces = False
        if counts:
            self.count += 1
            if self.count - 1 == self.at:
                raise self.error(f"planted at {func}")
        return func(*args, **(kwargs or {}))


class Kill(Fault):
    """Ends the process at operator number `at`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Trial:
    """A sharded model and its sizer, whose steps can be made anew."""

    def __init__(self, rank, rows=(4, 4), model=None, batch=None, loss=loss_fn, **how):
        self.rank, self.rows, self.loss = rank, rows, loss
        self.model = sharded(**how) if model is None else model
        self.sizer = brimful.BatchSizer(self.model)
        self.split = None
        mesh = how.get("mesh")
        device = "cpu" if mesh is None or mesh.device_type == "cpu" else "cuda"
        batch = batch_of(rows[rank.index], rank.index) if batch is None else batch
        self.batch = tuple(t.to(device) for t in batch)
        self.step()  # which learns the collectives
        self.state = self.sizer.state_dict()
        self.begin()
        with Fault(-1) as counter:
            self.step()
        self.places = counter.count
        self.expected = self.result()

    def begin(self):
        """The next step begins with the whole batch again, on all ranks."""
        self.model.zero_grad()
        self.sizer.load_state_dict(self.state)
        if self.split != [len(self.batch[0])]:  # by which the ranks have agreed on that many pieces
            self.step()
            self.model.zero_grad()

    def step(self, batch=None, **how):
        self.split = None  # of a step that fails
        outcome = self.sizer.step(self.batch if batch is None else batch, self.loss, **how)
        self.split = outcome.split
        return outcome

    def result(self):
        return gradients_of(self.model)

    def failing_at(self, places, close=1e-6):
        """Of places by rank those whose faults end otherwise than in the same gradients of two pieces."""
        bad = []
        for at in places:
            self.rank.progress()
            self.begin()
            with Fault(at.get(self.rank.index, -1)):
                outcome = self.step()
            if outcome.split != [2, 2] or worst(self.result(), self.expected) > close:
                bad.append((at, outcome.split))
        return bad

    def at_two_places(self, times, number):
        """Two ranks that fail in the same step."""
        draw = random.Random(number)
        return [{rank: draw.randrange(self.places) for rank in range(2)} for _ in range(times)]

    def error_of(self, fault):
        """How a step with the fault ends: the error's type and text, and after how many seconds."""
        self.begin()
        began = time.monotonic()

        def step():
            with fault:
                self.step()

        error = raised(step)
        return type(error).__name__, str(error), time.monotonic() - began
