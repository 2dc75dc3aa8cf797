"""Gradients that travel in another dtype, or through a communication hook."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from models import classes, cross_entropy, gradients_of, relative_difference, same_bits, values_of
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import brimful


def net(dtype=torch.float32):
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 40),
        torch.nn.Tanh(),
        torch.nn.Linear(40, 30),
        torch.nn.Tanh(),
        torch.nn.Linear(30, 3),
    ).to(dtype)


def wrap(module, **options):
    return brimful.DistributedDataParallel(module, bucket_cap_mb=0.0001, **options)


def mean_gradients(module, batches):
    reference = copy.deepcopy(module).double()
    sum(cross_entropy(reference, (x.double(), y)) / len(batches) for x, y in batches).backward()
    return gradients_of(reference)


def bf16_job(rank, error_feedback):
    module = net()
    batches = [classes(8, seed=r) for r in range(rank.size)]
    expected = mean_gradients(module, batches)
    model = wrap(copy.deepcopy(module), wire_dtype=torch.bfloat16, error_feedback=error_feedback)
    assert len(model.reducer.describe_plan().splitlines()) > 3
    steps = 40
    sums = {name: torch.zeros_like(g) for name, g in expected.items()}
    for _ in range(steps):
        cross_entropy(model, batches[rank.index]).backward()
        for name, gradient in gradients_of(model).items():
            sums[name] += gradient
        model.zero_grad()
    count = sum(p.numel() for p in module.parameters())
    record = model.telemetry()["buckets"][-1]["bytes"]
    assert 2 * count <= model.telemetry()["bytes"] - record <= 2 * count + 64 * 20
    means = {name: s / steps for name, s in sums.items()}
    return means, relative_difference(means, expected)


def test_bfloat16_halves_the_bytes_and_feedback_removes_the_bias(ranks):
    without = ranks(bf16_job, False)
    feedback = ranks(bf16_job, True)
    for means in (without, feedback):
        assert same_bits(means[0][0], means[1][0])
    assert 1e-4 < without[0][1] < 5e-2  # rounding of bfloat16
    assert feedback[0][1] < without[0][1] / 5


class Scale(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(64, dtype=dtype))

    def forward(self, x):
        return self.weight * x


def fp32_sum_job(rank, dtype, wire):
    """The mean of one large gradient and small ones, by the rank of the large one."""
    model = wrap(Scale(dtype), wire_dtype=wire)
    means = []
    for large in range(rank.size):
        model.zero_grad()
        x = torch.full((64,), 1.0 if rank.index == large else 2.0**-9, dtype=dtype)
        model(x).sum().backward()
        assert model.module.weight.grad.dtype == dtype
        means.append(model.module.weight.grad.float().unique().tolist())
    return means


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_on_the_wire_sums_low_precision_exactly(ranks, dtype):
    small = 2.0**-9
    exact = torch.tensor((1 + 3 * small) / 4).to(dtype).item()
    for values in ranks(fp32_sum_job, dtype, torch.float32, size=4):
        assert values == [[exact]] * 4
    if dtype == torch.bfloat16:  # what it guards against: it depends on the order of the sum
        assert ranks(fp32_sum_job, dtype, None, size=4)[0] != [[exact]] * 4


def retry_job(rank, failing):
    """A step that is repeated, after buckets were launched, leaves no trace in the error that is carried on."""
    states = []
    for faulty in (False, True):
        model = wrap(net(), wire_dtype=torch.bfloat16, error_feedback=True, plan="registration")
        sizer = brimful.BatchSizer(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            batch = classes(8, seed=10 * rank.index + step)
            fault = Fault(faulty and step == 2 and rank.index == failing)
            split = [4, 4]
            if not faulty and step == 2 and rank.index == failing:
                split = [2, 2, 2, 2]  # as the repeated one
            outcome = sizer.step(batch, fault.loss, split=split)
            assert outcome.retries == int(faulty and step == 2)
            optimizer.step()
            optimizer.zero_grad()
        states.append(values_of(model))
    return same_bits(*states)


class Fault:
    """Memory runs out once, at the last gradient of the second piece: the first buckets were launched."""

    def __init__(self, armed):
        self.armed = armed
        self.pieces = 0

    def loss(self, model, piece):
        self.pieces += 1
        handle = None
        if self.armed and self.pieces == 2:
            handle = next(model.module.parameters()).register_hook(self.run_out)
        loss = cross_entropy(model, piece)
        if handle is None:
            return loss
        self.handle = handle
        return loss

    def run_out(self, gradient):
        self.handle.remove()
        raise torch.OutOfMemoryError("planted")


@pytest.mark.parametrize("failing", [0, 1])
def test_error_feedback_survives_a_repeated_step(ranks, failing):
    assert all(ranks(retry_job, failing))


class Backwards(torch.nn.Module):
    """The learned order of gradients is the reverse of the first plan's; a large one is reduced where it lies."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(3)
        sizes = [3, 40, 1100, 1000, 30, 6]
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(into, out, dtype=dtype) for out, into in itertools.pairwise(sizes)
        )

    def forward(self, x):
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def new_plan_job(rank, dtype):
    """Gradients of steps with error feedback, and the plans of the first and the last step."""
    results = []
    for plan in ("registration", "ordered"):
        model = brimful.DistributedDataParallel(
            Backwards(dtype),
            bucket_cap_mb=0.05,
            plan=plan,
            wire_dtype=torch.bfloat16,
            error_feedback=True,
        )
        plans, gradients = [], []
        for step in range(4):
            x, y = classes(4, seed=10 * step + rank.index, dtype=dtype)
            cross_entropy(model, (x, y)).backward()
            plans.append(model.plan)
            gradients.append(gradients_of(model))
            model.zero_grad()
        results.append((plans, gradients))
    (fixed, expected), (learned, found) = results
    assert fixed[0] == fixed[-1] == learned[0] != learned[-1]
    return all(same_bits(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_new_plan_takes_the_carried_errors_along(ranks, dtype):
    assert all(ranks(new_plan_job, dtype))


def predivide_job(rank, factor):
    model = wrap(Scale(torch.float32), gradient_predivide_factor=factor)
    model(torch.full((64,), float(rank.index + 1))).sum().backward()
    return model.module.weight.grad[0].item()


@pytest.mark.parametrize("factor", [None, 1.0, 3.0, 0.5])
def test_predivision_does_not_change_the_mean(ranks, factor):
    assert ranks(predivide_job, factor) == pytest.approx([1.5, 1.5])


DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
REDUCED = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
NOT_REDUCED = sorted(DTYPES - REDUCED, key=str)


def test_dtypes_of_all_kinds_are_not_reduced():
    assert {torch.bool, torch.int64, torch.complex64, torch.float8_e5m2} <= set(NOT_REDUCED)


def bad_options_job(rank):
    for options, match in (
        ({"error_feedback": True}, "error_feedback: true"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor: 0"),
        ({"plan": "fastest"}, "plan: fastest"),
        ({"plan": "[[0]]"}, "not a plan"),
    ):
        with pytest.raises(ValueError, match=match):
            wrap(net(), **options)
    for dtype in NOT_REDUCED:
        match = r"cannot be reduced in this dtype \(wire_dtype: \w+\); choose .*torch\.bfloat16"
        with pytest.raises(ValueError, match=match):
            wrap(net(), wire_dtype=dtype)
    for dtype in REDUCED:
        wrap(net(), wire_dtype=dtype)
    with pytest.raises(TypeError, match="wire_dtype"):
        wrap(net(), wire_dtype="bfloat16")
    with pytest.raises(brimful.PlanMismatch, match=r"reduction dtype: (BFloat16|as the gradients)"):
        wrap(net(), wire_dtype=torch.bfloat16 if rank.index == 0 else None)


def test_bad_options_are_refused_on_every_rank(ranks):
    ranks(bad_options_job)


# --- Communication hooks ---------------------------------------------------------------------------

HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


def torch_hook_job(rank, name, steps=3):
    gradients = {}
    for ours in (True, False):
        module = net()
        # PowerSGD's futures call collectives: with several buckets over gloo their order is open, in torch too.
        cap = 25 if name == "powersgd" else 0.0001
        kind = brimful if ours else torch.nn.parallel
        model = kind.DistributedDataParallel(module, bucket_cap_mb=cap)
        if name == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=30, start_powerSGD_iter=2, min_compression_rate=0.1
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            model.register_comm_hook(None, HOOKS[name])
        for step in range(steps):
            model.zero_grad()
            cross_entropy(model, classes(8, seed=10 * rank.index + step)).backward()
        gradients[ours] = gradients_of(model)
    return relative_difference(gradients[True], gradients[False])


@pytest.mark.parametrize("name", [*HOOKS, "powersgd"])
def test_torchs_hooks_do_what_they_do_in_torch(ranks, name):
    for difference in ranks(torch_hook_job, name):
        assert difference < (1e-3 if name == "powersgd" else 1e-6)


def surface_job(rank):
    seen = []

    def hook(state, bucket):
        assert state == "state"
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert gradient.shape == parameter.shape
        seen.append((bucket.index(), bucket.is_last(), bucket.buffer().numel()))
        bucket.buffer().div_(rank.size)
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda f: f.value()[0])

    module = net()
    module.add_module("large", torch.nn.Linear(1030, 1030))  # a direct bucket
    module.large.requires_grad_(True)
    model = brimful.DistributedDataParallel(Both(module), bucket_cap_mb=0.0001)
    model.register_comm_hook("state", hook)
    for _ in range(2):
        seen.clear()
        x = torch.full((2, 6), float(rank.index))
        model(x).backward()
        assert [index for index, _, _ in seen] == list(range(len(seen)))
        assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
        assert sum(numel for _, _, numel in seen) >= sum(p.numel() for p in model.parameters())
        mean = model.module.inner.large.bias.grad
        model.zero_grad()
    return mean


class Both(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner[:5](x).sum() + self.inner.large(x.new_ones(1, 1030) * x.sum()).sum()


def test_a_hook_sees_torchs_buckets(ranks):
    means = ranks(surface_job)
    assert torch.equal(*means)


def weighted_hook_job(rank):
    """Under a sizer a hook's mean becomes the exact weighted mean."""
    module = net()
    rows = [6, 2]
    batches = [classes(rows[r], seed=r) for r in range(2)]
    reference = copy.deepcopy(module).double()
    sum(cross_entropy(reference, (x.double(), y)) * (len(y) / 8) for x, y in batches).backward()
    model = wrap(module)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    sizer = brimful.BatchSizer(model)
    for split in (None, [1] * rows[rank.index]):
        sizer.step(batches[rank.index], cross_entropy, split=split)
        assert relative_difference(gradients_of(model), gradients_of(reference)) < 1e-6
        model.zero_grad()


def test_a_hook_under_a_sizer(ranks):
    ranks(weighted_hook_job)


class PlantedError(Exception):
    pass


def failing_hook_job(rank, where, failing, loop):
    """An exception in a hook, in its call or in its future: both ranks raise, and the next step works."""
    calls = [0]
    at = [None]

    def hook(state, bucket):
        calls[0] += 1
        fails = rank.index == failing and at[0] == calls[0]
        if fails and where == "call":
            raise PlantedError("planted in the hook")
        future = default_hooks.allreduce_hook(None, bucket)
        if fails:

            def broken(f):
                raise PlantedError("planted in the hook's future")

            return future.then(broken)
        return future

    model = wrap(net())
    model.register_comm_hook(None, hook)
    sizer = brimful.BatchSizer(model)
    batch = classes(8, seed=rank.index)

    def step():
        model.zero_grad()
        calls[0] = 0
        if loop == "sizer":
            sizer.step(batch, cross_entropy)
        else:
            cross_entropy(model, batch).backward()
        return gradients_of(model)

    clean = step()
    buckets = calls[0]
    assert buckets >= 3
    for at[0] in range(1, buckets + 1):
        error = None
        try:
            step()
        except Exception as e:
            error = e
        if rank.index == failing:
            assert "planted in the hook" in str(error), repr(error)
        else:
            assert isinstance(error, brimful.RankFailed), repr(error)
            assert error.rank == failing and "planted in the hook" in str(error)
        at[0] = None
        assert same_bits(step(), clean)
    return buckets


@pytest.mark.parametrize("loop", ["plain", "sizer"])
@pytest.mark.parametrize("where", ["call", "future"])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_in_a_hook(ranks, where, failing, loop):
    ranks(failing_hook_job, where, failing, loop)


def other_bucket(state, bucket: torch.Tensor):
    return default_hooks.allreduce_hook(state, bucket)


def other_result(state, bucket: dist.GradBucket) -> torch.Tensor:
    return default_hooks.allreduce_hook(state, bucket)


def annotated(state, bucket: "dist.GradBucket") -> "torch.futures.Future[torch.Tensor]":
    return default_hooks.allreduce_hook(state, bucket)


def unknown_names(state, bucket: "Elsewhere") -> "Elsewhere":  # noqa: F821
    return default_hooks.allreduce_hook(state, bucket)


def misuse_job(rank):
    model = wrap(net())
    theirs = torch.nn.parallel.DistributedDataParallel(net())
    for hook, error in ((3, TypeError), (other_bucket, ValueError), (other_result, ValueError)):
        for kind in (model, theirs):
            with pytest.raises(error, match=r"callable|annotat"):
                kind.register_comm_hook(None, hook)
    for hook in (annotated, unknown_names):
        wrap(net()).register_comm_hook(None, hook)
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        pair = wrap(net()), torch.nn.parallel.DistributedDataParallel(net())
        for each in pair:
            each._register_builtin_comm_hook(kind)
            cross_entropy(each, classes(8, seed=rank.index)).backward()
        assert relative_difference(*(gradients_of(each) for each in pair)) < 1e-6
    mine = default_hooks.allreduce_hook if rank.index == 0 else default_hooks.fp16_compress_hook
    with pytest.raises(brimful.PlanMismatch, match="fp16_compress_hook"):
        model.register_comm_hook(None, mine)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(ValueError, match="communication hook already"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(ValueError, match="wire_dtype"):
        wrap(net(), wire_dtype=torch.bfloat16).register_comm_hook(None, mine)


def test_a_hook_is_registered_once_and_equal_on_all_ranks(ranks):
    ranks(misuse_job)
