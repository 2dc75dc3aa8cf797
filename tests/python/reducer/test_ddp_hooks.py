"""Communication hooks that make several collectives a bucket, one behind the other, and ranks that drain meanwhile."""

import copy
import datetime
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from models import classes, cross_entropy, gradients_of, relative_difference, same_bits
from rank_processes import raised
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)

import brimful

SMALL_BUCKETS_MB = 0.0001


def net(dtype=torch.float32):
    """Odd numbers of elements: nothing is aligned by chance."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 41),
        torch.nn.Tanh(),
        torch.nn.Linear(41, 29),
        torch.nn.Tanh(),
        torch.nn.Linear(29, 3),
    ).to(dtype)


def chained_hook(state, bucket):
    """The second collective comes from the thread that ended the first, and has another size."""
    largest = bucket.buffer().abs().max().reshape(1)
    first = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True).get_future()

    def second(future):
        scale = future.value()[0].clamp_min(1e-30)
        scaled = bucket.buffer() / scale / dist.get_world_size()
        return dist.all_reduce(scaled, async_op=True).get_future().wait()[0] * scale

    return first.then(second)


def register(model, kind):
    if kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.1
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        hooks = {
            "chained": chained_hook,
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": bf16_hook,
        }
        model.register_comm_hook(None, hooks[kind])
    return model


def bf16_hook(state, bucket):
    """torch refuses its own without a GPU, by the function's name."""
    return default_hooks.bf16_compress_hook(state, bucket)


def require_same_gradients(rank, model):
    found = [None] * rank.size
    dist.all_gather_object(found, gradients_of(model))
    assert all(same_bits(found[0], other) for other in found[1:])
    assert all(g is not None and g.isfinite().all() for g in found[0].values())


class PlantedError(Exception):
    pass


class Planter:
    """Raises once, where it is asked to: "forward", or the number of a parameter whose gradient has come."""

    def __init__(self, model):
        self.point = None
        model.module[2].register_forward_pre_hook(lambda *_: self.reach("forward"))
        for number, parameter in enumerate(model.parameters()):
            parameter.register_hook(lambda _, number=number: self.reach(number))

    def reach(self, point):
        if self.point == point:
            self.point = None
            raise PlantedError("planted")


def draining_job(rank, kind):
    """A rank fails in any place of a step, with steps that all make between: nobody dies, all raise."""
    model = register(brimful.DistributedDataParallel(net(), bucket_cap_mb=SMALL_BUCKETS_MB), kind)
    planter = Planter(model)
    sizer = brimful.BatchSizer(model)
    batch = classes(8, seed=rank.index)

    def step(loop):
        model.zero_grad()
        if loop == "sizer":
            sizer.step(batch, cross_entropy)
        else:
            with model.step() if loop == "scope" else nullcontext():
                cross_entropy(model, batch).backward()

    for _ in range(3):
        step("scope")
    places = ["forward", *range(len(list(model.parameters())))]
    cases = [("plain", 2, rank.size - 1), ("plain", "forward", 0)]
    cases += [
        (loop, place, (number + i) % rank.size)
        for i, loop in enumerate(("scope", "sizer"))
        for number, place in enumerate(places)
    ]
    for loop, place, failing in cases:
        planter.point = place if rank.index == failing else None
        error = raised(step, loop)
        if rank.index == failing:
            assert isinstance(error, PlantedError), (loop, place, repr(error))
        else:
            assert isinstance(error, brimful.RankFailed), (loop, place, repr(error))
            assert error.rank == failing
        step(loop)
        require_same_gradients(rank, model)
    one_row = classes(1, seed=rank.index)

    def without_memory(model, piece):
        loss = cross_entropy(model, piece)
        brimful.memory.set_limit("cpu", brimful.memory.stats("cpu").used_bytes)
        return loss + torch.ones(100_000).sum()

    for failing in range(rank.size):  # no split is left: the rank drains under its limit
        model.zero_grad()
        try:
            loss = without_memory if rank.index == failing else cross_entropy
            error = raised(sizer.step, one_row, loss)
        finally:
            brimful.memory.set_limit("cpu", None)
        assert isinstance(error, (torch.OutOfMemoryError, brimful.RankOutOfMemory)), repr(error)
        step("sizer")
        require_same_gradients(rank, model)
    return model.reducer.buckets


@pytest.mark.parametrize("kind", ["powersgd", "chained", "fp16", "bf16"])
def test_a_rank_that_fails_beside_a_hook_with_several_collectives(ranks, kind):
    assert min(ranks(draining_job, kind, watchdog_s=60)) >= 5


def joining_job(rank, kind, steps):
    """Ranks that leave at different times: as with torch's class, with one bucket, where its hooks keep their order."""
    trained = {}
    for name, wrapper, cap in (
        ("torch", torch.nn.parallel.DistributedDataParallel, 25),
        ("ours", brimful.DistributedDataParallel, 25),
        ("buckets", brimful.DistributedDataParallel, SMALL_BUCKETS_MB),
    ):
        model = register(wrapper(net(), bucket_cap_mb=cap), kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(steps[rank.index]):
                cross_entropy(model, classes(8, seed=10 * step + rank.index)).backward()
                optimizer.step()
                optimizer.zero_grad()
        trained[name] = {n: p.detach().clone() for n, p in model.module.named_parameters()}
    found = [None] * rank.size
    dist.all_gather_object(found, trained)
    for theirs in found:
        assert all(same_bits(theirs[name], found[0][name]) for name in theirs)
    return {
        name: relative_difference(trained[name], trained["torch"]) for name in ("ours", "buckets")
    }


@pytest.mark.parametrize("steps", [(2, 4), (4, 0)])
@pytest.mark.parametrize("kind", ["powersgd", "chained"])
def test_join_with_a_hook_of_several_collectives(ranks, kind, steps):
    for difference in ranks(joining_job, kind, steps, watchdog_s=60):
        assert difference["ours"] < 1e-5
        assert kind == "powersgd" or difference["buckets"] < 1e-5


class Mixed(torch.nn.Module):
    """Buckets of every kind: small ones of odd sizes, one that is reduced where it lies, complex ones, and buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.small = torch.nn.Sequential(
            torch.nn.Linear(3, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 5)
        )
        self.large = torch.nn.Linear(1031, 1031)
        self.phase = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.turn = torch.nn.Parameter(torch.randn(5, 1, dtype=torch.complex64))

    def forward(self, x):
        small = self.small(x)
        large = self.large(small.sum() * x.new_ones(1, 1031) * 0.01).square().mean()
        return (small.sum(0) * self.turn[:, 0]).abs().sum() + (self.phase * large).abs().sum()


def dense_job(rank):
    """What a bucket says of itself is consistent, in every bucket, and walking through it finds each gradient."""
    norms = []
    kinds = set()

    def hook(state, bucket):
        buffer, gradients, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
        assert buffer.numel() == sum(p.numel() for p in parameters)
        assert buffer.dtype == parameters[0].dtype and buffer.is_contiguous()
        offset = 0
        for gradient, parameter in zip(gradients, parameters, strict=True):
            part = buffer[offset : offset + parameter.numel()]
            assert part.data_ptr() == gradient.data_ptr() and gradient.shape == parameter.shape
            torch.testing.assert_close(part, local[parameter].flatten(), rtol=0, atol=0)
            norms.append(part.norm())
            offset += parameter.numel()
        kinds.add((buffer.dtype, len(parameters) > 1))
        seen.append((bucket.index(), bucket.is_last()))
        bucket.set_buffer(buffer.clone())
        assert bucket.buffer().data_ptr() != buffer.data_ptr()
        return default_hooks.allreduce_hook(None, bucket)

    for cap in (SMALL_BUCKETS_MB, 25):
        module = Mixed()
        reference = copy.deepcopy(module)
        model = brimful.DistributedDataParallel(module, bucket_cap_mb=cap)
        model.register_comm_hook(None, hook)
        for step in range(4):  # the plan of the second step is not that of the first
            x = [
                torch.randn(4, 3, generator=torch.Generator().manual_seed(step + 10 * r))
                for r in (0, 1)
            ]
            means = None
            for r in (0, 1):
                reference.load_state_dict(module.state_dict())
                reference.zero_grad()
                reference(x[r]).backward()
                own = [p.grad.clone() for p in reference.parameters()]
                if r == rank.index:
                    local = dict(zip(module.parameters(), own, strict=True))
                means = (
                    own if means is None else [(a + b) / 2 for a, b in zip(means, own, strict=True)]
                )
            seen, norms[:] = [], []
            model.zero_grad()
            model(x[rank.index]).backward()
            total = torch.stack([g.norm() for g in local.values()]).norm()
            torch.testing.assert_close(torch.stack(norms).norm(), total)
            count = model.reducer.buckets - 1  # the control record has one of its own
            assert seen == [(i, i == count - 1) for i in range(count)]
            for parameter, mean in zip(module.parameters(), means, strict=True):
                torch.testing.assert_close(parameter.grad, mean)
    return kinds


def test_a_hooks_buffer_is_dense(ranks):
    for kinds in ranks(dense_job):
        assert kinds >= {(torch.float32, False), (torch.float32, True), (torch.complex64, True)}


def per_channel(group, bucket):
    return quantization_hooks.quantization_perchannel_hook(group, bucket, bucket_size=64)


def norm_walk(state, bucket):
    """Each gradient is divided by its norm, found by numel()."""
    offset = 0
    parts = []
    for parameter in bucket.parameters():
        part = bucket.buffer()[offset : offset + parameter.numel()]
        parts.append(part / part.norm().clamp_min(1e-12) / dist.get_world_size())
        offset += parameter.numel()
    future = dist.all_reduce(torch.cat(parts), async_op=True).get_future()
    return future.then(lambda f: f.value()[0])


def side_by_side_job(rank):
    """torch's class and this one, hook by hook: the same gradients once both have learned the order of buckets."""
    group = dist.group.WORLD
    hooks = {
        "per tensor": (group, quantization_hooks.quantization_pertensor_hook),
        "per channel": (group, per_channel),
        "walk": (None, norm_walk),
    }
    found = {}
    for name, (state, hook) in hooks.items():
        gradients = []
        for wrapper in (torch.nn.parallel.DistributedDataParallel, brimful.DistributedDataParallel):
            model = wrapper(net(), bucket_cap_mb=25)
            model.register_comm_hook(state, hook)
            for step in range(4):
                model.zero_grad()
                cross_entropy(model, classes(8, seed=10 * step + rank.index)).backward()
            gradients.append(gradients_of(model))
        found[name] = relative_difference(*reversed(gradients))
    return found


def test_torchs_quantization_hooks_give_torchs_gradients(ranks):
    for found in ranks(side_by_side_job):
        assert max(found.values()) < 1e-6, found


def wrong_size_job(rank):
    """A result of another size is refused before the step is accepted, on all ranks."""
    sizes = iter([0, 1, -1, 0])

    def hook(state, bucket):
        size = next(sizes) if rank.index == 1 else 0
        future = default_hooks.allreduce_hook(None, bucket)
        return future.then(lambda f: f.value()[:size] if size else f.value())

    model = brimful.DistributedDataParallel(net())
    model.register_comm_hook(None, hook)
    errors = []
    for _ in range(4):
        model.zero_grad()
        errors.append(raised(lambda: cross_entropy(model, classes(8)).backward()))
    return [repr(error) for error in errors]


def test_a_hooks_result_of_another_size_fails_the_step_everywhere(ranks):
    zero, one = ranks(wrong_size_job)
    assert (zero[0], zero[3], one[0], one[3]) == ("None",) * 4
    for i in (1, 2):
        assert "RankFailed" in zero[i] and "another size than its bucket's buffer" in zero[i]
        assert one[i].startswith("ValueError") and "another size than its bucket's buffer" in one[i]


def raise_planted(future):
    raise PlantedError("planted in the future")


def broken_chain_job(rank, failing):
    """A hook that raises between its collectives leaves the others waiting: all raise, soon."""
    errors = []
    for where in ("call", "then", "future"):
        group = dist.new_group(timeout=datetime.timedelta(seconds=15))
        step = [0]

        def hook(state, bucket, group=group, where=where, step=step):
            buffer = bucket.buffer()
            fails = step[0] == 2 and rank.index == failing and bucket.index() == 1
            first = dist.all_reduce(buffer[:1].clone(), group=group, async_op=True).get_future()
            if fails and where == "call":
                raise PlantedError("planted in the call")
            if fails and where == "then":
                return first.then(raise_planted)

            result = torch.futures.Future()

            def second(future):
                if fails:
                    result.set_exception(PlantedError("planted in the future"))
                    return
                work = dist.all_reduce(buffer / rank.size, group=group, async_op=True)
                work.get_future().add_done_callback(lambda last: result.set_result(last.value()[0]))

            first.add_done_callback(second)  # waits for nothing: gloo would wait for its timeout
            return result

        model = brimful.DistributedDataParallel(
            net(), process_group=group, bucket_cap_mb=SMALL_BUCKETS_MB, plan="registration"
        )
        model.register_comm_hook(None, hook)
        for step[0] in (1, 2):
            model.zero_grad()
            error = raised(lambda model=model: cross_entropy(model, classes(8)).backward())
            assert (error is None) == (step[0] == 1), repr(error)
        assert error.seconds < 10
        errors.append(error)
    return [(type(error).__name__, str(error)) for error in errors]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_hook_that_raises_between_its_collectives(ranks, failing):
    found = ranks(broken_chain_job, failing, watchdog_s=40)
    for name, words in found[1 - failing]:
        assert name == "RankFailed" and f"rank {failing} failed" in words and "planted" in words
    for name, words in found[failing]:
        assert "planted" in words, (name, words)
