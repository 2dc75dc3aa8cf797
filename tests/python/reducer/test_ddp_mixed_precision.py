"""``mixed_precision=``: float32 parameters, forward and backward in another dtype; against torch's class."""

import contextlib
import copy
import dataclasses
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from ddp_reference import wrap
from models import gradients_of, relative_difference, same_bits
from rank_processes import Rank, raised
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

import brimful

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32


def everything(dtype, reduce_dtype=None):
    return _MixedPrecision(dtype, reduce_dtype or dtype, dtype)


class NoStream:
    """In the place of the accelerator's streams and events, without which torch's class does not start."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def record(self, *stream):
        pass

    def wait(self, stream=None):
        pass

    def wait_stream(self, stream):
        pass


def torchs(module, config):
    torch.Stream = torch.Event = NoStream
    torch.accelerator.current_stream = lambda *device: NoStream()
    return DistributedDataParallel(module, mixed_precision=config, find_unused_parameters=False)


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def conv_bn():
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 3),
    )


def nothing():
    pass


class Block(torch.nn.Module):
    """MultiheadAttention reads the weight of out_proj without a call of it."""

    def __init__(self, width=8):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = torch.nn.LayerNorm(width)
        self.scale = torch.nn.Parameter(torch.full((width,), 1.1))
        self.before = nothing

    def forward(self, x):
        self.before()
        y = self.norm(x) * self.scale
        return x + self.attention(y, y, y, need_weights=False)[0]


class Attention(torch.nn.Module):
    """`reentrant`: blocks run again in backward; None: they do not."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.reentrant = reentrant
        self.into = torch.nn.Linear(6, 8)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.out = torch.nn.Linear(8, 3)

    def forward(self, x):
        x = self.into(x)
        for block in self.blocks:
            again = self.reentrant is not None
            x = checkpoint(block, x, use_reentrant=self.reentrant) if again else block(x)
        return self.out(x)


class Lstm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(6, 5, num_layers=2)

    def forward(self, x):
        return self.lstm(x)[0]


class Tied(torch.nn.Module):
    """A parameter of two modules."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.out = torch.nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.embedding(x))


MODELS = {
    "mlp": (mlp, (5, 6)),
    "conv_bn": (conv_bn, (5, 2, 6, 6)),
    "attention": (Attention, (2, 4, 6)),
    "lstm": (Lstm, (4, 3, 6)),
    "tied": (Tied, None),
}


def made(name):
    torch.manual_seed(1)
    return MODELS[name][0]()


def inputs_of(name, rank, step=0):
    generator = torch.Generator().manual_seed(10 * step + rank.index)
    shape = MODELS[name][1]
    if shape is None:
        return torch.randint(0, 11, (7,), generator=generator)
    return torch.randn(shape, generator=generator)


def both(rank):
    return [Rank(other, rank.size) for other in range(rank.size)]


def loss_of(outputs):
    return outputs.float().square().mean()


def require_masters(model, before):
    now = dict(model.module.named_parameters())
    assert list(now) == list(before)
    assert all(now[name] is before[name] for name in before)
    for module in model.module.modules():
        for weight in getattr(module, "_flat_weights", ()):
            assert isinstance(weight, torch.nn.Parameter)


def train(model, rank, name, steps=3):
    """Gradients and outputs of some steps; parameters and gradients are float32 after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Not counted: what torch's class reduces first are buckets that it made before it knew the dtype, with no gradient
    # in them (2.15).
    loss_of(model(inputs_of(name, rank))).backward()
    history = []
    masters = dict(model.module.named_parameters())
    for step in range(steps):
        optimizer.zero_grad()
        outputs = model(inputs_of(name, rank, step))
        loss_of(outputs).backward()
        history.append({**gradients_of(model), "outputs": outputs.detach()})
        if isinstance(model, brimful.DistributedDataParallel):
            require_masters(model, masters)
        assert {p.dtype for p in model.parameters()} == {FP32}
        assert {p.grad.dtype for p in model.parameters()} == {FP32}
        optimizer.step()
    state = model.module.state_dict()
    return [*history, {name: t.float() for name, t in state.items() if t.is_floating_point()}]


def parity_job(rank, name, config, options):
    ours = train(wrap(made(name), mixed_precision=config, **options), rank, name)
    theirs = train(torchs(made(name), config), rank, name)
    if rank.index != 0:  # torch's class makes buffers equal when the next step begins
        ours.pop()
        theirs.pop()
    return ours, theirs


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (everything(BF16), {}),
        (everything(BF16, FP32), {}),
        (everything(FP16), {"gradient_predivide_factor": 1.0}),  # or halves of the least numbers
    ],
)
@pytest.mark.parametrize("name", ["mlp", "conv_bn", "lstm"])
def test_gradients_outputs_and_state_are_torchs_bit_for_bit(ranks, name, config, options):
    for ours, theirs in ranks(parity_job, name, config, options):
        assert {h["outputs"].dtype for h in ours[:3]} == {config.param_dtype}
        theirs[-1].pop("1.num_batches_tracked", None)  # torch's class makes a bfloat16 of it
        for mine, other in zip(ours, theirs, strict=True):
            assert same_bits(mine, other)


def reference_job(rank, name):
    module = made(name)
    expected = [low_gradients(module, [inputs_of(name, other)]) for other in both(rank)]
    model = wrap(module, mixed_precision=everything(BF16, FP32))
    for _ in range(2):
        model.zero_grad()
        loss_of(model(inputs_of(name, rank))).backward()
    return gradients_of(model), {n: (expected[0][n] + expected[1][n]) / 2 for n in expected[0]}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_a_module_in_the_lower_precision(ranks, name):
    """torch's class fails at two of them: a parameter of two modules, and one whose module is not called."""
    for found, expected in ranks(reference_job, name):
        assert same_bits(found, expected)


def checkpointed_job(rank, reentrant, compiled):
    torch.manual_seed(1)
    plain = Attention()
    torch.manual_seed(1)
    module = Attention(reentrant)
    if compiled:
        for block in module.blocks:
            block.compile(backend="aot_eager")
    histories = [
        train(wrap(m, mixed_precision=everything(BF16)), rank, "attention") for m in (plain, module)
    ]
    return all(same_bits(*pair) for pair in zip(*histories, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_runs_again_as_it_ran(ranks, reentrant):
    assert all(ranks(checkpointed_job, reentrant, False))


def compiled_job(rank, way):
    module = made("attention")
    model = wrap(module, mixed_precision=everything(BF16), plan="registration")
    expected = train(
        wrap(copy.deepcopy(module), mixed_precision=everything(BF16)), rank, "attention"
    )
    if way == "around":
        call = torch.compile(model, backend="aot_eager")
    else:
        call = model
        if way == "inside":
            model.module.compile(backend="aot_eager")
        else:
            for block in module.blocks:
                block.reentrant = False
                block.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, reference in enumerate(expected[:-1]):
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            outputs = call(inputs_of("attention", rank, step))
        assert outputs.dtype == BF16
        loss_of(outputs).backward()
        found = gradients_of(model)
        assert relative_difference(found, {n: reference[n] for n in found}) < 0.02
        optimizer.step()
        optimizer.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("way", ["around", "inside", "blocks"])
def test_compiled_modules_compute_in_the_lower_precision_without_recompiles(ranks, way):
    ranks(compiled_job, way, watchdog_s=90)


def test_a_checkpointed_block_may_be_compiled(ranks):
    assert all(ranks(checkpointed_job, False, True, watchdog_s=90))


def low_gradients(module, batches, dtype=BF16):
    """Sum of the gradients of a copy in `dtype`, each taken to float32 first."""
    total = None
    for x in batches:
        replica = copy.deepcopy(module).to(dtype)
        loss_of(replica(x.to(dtype) if x.is_floating_point() else x)).backward()
        found = {name: g.float() for name, g in gradients_of(replica).items()}
        total = found if total is None else {name: total[name] + found[name] for name in found}
    return total


def no_sync_job(rank):
    module = made("mlp")
    everyone = [
        low_gradients(module, [inputs_of("mlp", other, step) for step in range(2)])
        for other in both(rank)
    ]
    model = wrap(module, mixed_precision=everything(BF16, FP32))
    with model.no_sync():
        loss_of(model(inputs_of("mlp", rank, 0))).backward()
    assert {p.grad.dtype for p in model.parameters()} == {FP32}
    loss_of(model(inputs_of("mlp", rank, 1))).backward()
    return gradients_of(model), {n: (everyone[0][n] + everyone[1][n]) / 2 for n in everyone[0]}


def test_gradients_accumulate_in_float32_under_no_sync(ranks):
    for found, expected in ranks(no_sync_job):
        assert same_bits(found, expected)


def sizer_job(rank):
    module = made("mlp")
    batches = [inputs_of("mlp", other).repeat(2, 1)[:8] for other in both(rank)]
    pieces = [piece for batch in batches for piece in batch.split(2)]
    expected = {n: g / len(pieces) for n, g in low_gradients(module, pieces).items()}
    model = wrap(module, mixed_precision=everything(BF16, FP32))
    sizer = brimful.BatchSizer(model)
    seen = []

    def loss_fn(net, piece):
        outputs = net(piece)
        seen.append(outputs.dtype)
        if rank.index == 1 and len(seen) == 2:
            raise torch.OutOfMemoryError("planted")
        return loss_of(outputs)

    outcome = sizer.step(batches[rank.index], loss_fn, split=[4, 4])
    assert (outcome.retries, set(seen)) == (rank.index, {BF16})
    assert {p.dtype for p in model.parameters()} == {FP32}
    return gradients_of(model), expected


def test_a_batch_sizer_splits_and_retries_in_the_lower_precision(ranks):
    for found, expected in ranks(sizer_job):
        assert relative_difference(found, expected) < 0.02


class Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(6, 3) for _ in range(3))
        self.used = 0

    def forward(self, x):
        return self.parts[self.used](x)


def unused_job(rank):
    model = wrap(Halves(), mixed_precision=everything(BF16))
    model.module.used = rank.index
    x = inputs_of("mlp", rank)
    own = low_gradients(model.module.parts[rank.index], [x])
    loss_of(model(x)).backward()
    return own, gradients_of(model)


def test_unused_parameters_have_the_mean_or_none(ranks):
    results = ranks(unused_job)
    for _, found in results:
        for part in range(2):
            for kind in ("weight", "bias"):
                assert torch.equal(found[f"parts.{part}.{kind}"], results[part][0][kind] / 2)
        assert found["parts.2.weight"] is None and found["parts.2.bias"] is None


def sparse_job(rank):
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2))
    model = wrap(module, mixed_precision=everything(BF16, FP32))
    ids = torch.tensor([1, 3 + rank.index])
    own = copy.deepcopy(module).to(BF16)
    loss_of(own(ids)).backward()
    loss_of(model(ids)).backward()
    gradient = module[0].weight.grad
    assert gradient.is_sparse and gradient.dtype == FP32
    return own[0].weight.grad.to_dense().float(), gradient.to_dense()


def test_sparse_gradients_come_back_in_float32(ranks):
    results = ranks(sparse_job)
    for _, found in results:
        assert torch.equal(found, (results[0][0] + results[1][0]) / 2)


class Fails(Exception):
    pass


def exception_job(rank, kind, reentrant, in_backward):
    torch.manual_seed(1)
    model = wrap(Attention(reentrant), mixed_precision=everything(BF16))
    before = dict(model.module.named_parameters())
    x = inputs_of("attention", rank)
    calls = []

    def fail():
        calls.append(None)
        if len(calls) == (2 if in_backward else 1):
            assert model.module.blocks[1].norm.weight.dtype == BF16
            raise kind

    def attempt():
        loss_of(model(x)).backward()

    model.module.blocks[1].before = fail
    with contextlib.suppress(kind):
        attempt()
    model.module.blocks[1].before = nothing
    if kind is Fails or not in_backward:
        require_masters(model, before)
    model.zero_grad()
    with torch.no_grad():
        for parameter in before.values():
            parameter.mul_(0.5)  # what was cast before is of no use
    attempt()
    require_masters(model, before)
    assert {p.grad.dtype for p in model.parameters()} == {FP32}
    return low_gradients(model.module, [x]), gradients_of(model)


@pytest.mark.parametrize("kind", [Fails, KeyboardInterrupt])
@pytest.mark.parametrize(("reentrant", "in_backward"), [(None, False), (False, True), (True, True)])
def test_an_exception_leaves_the_parameters_in_their_places(ranks, kind, reentrant, in_backward):
    for expected, found in ranks(exception_job, kind, reentrant, in_backward, size=1):
        assert same_bits(found, expected)


def half_the_activations_job(rank):
    held, peaks = [], []
    for config in (None, everything(BF16)):
        torch.manual_seed(1)
        module = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8))
        )
        model = wrap(module, mixed_precision=config)
        x = torch.randn(8192, 64)
        for _ in range(2):  # the first one makes what stays
            brimful.memory.reset_peak("cpu")
            before = brimful.memory.stats("cpu").used_bytes
            outputs = model(x)
            after = brimful.memory.stats("cpu").used_bytes
            outputs.sum().backward()
            peak = brimful.memory.stats("cpu").peak_bytes
            del outputs
            model.zero_grad()
        held.append(after - before)
        peaks.append(peak - before)
    return held, peaks


def test_activations_take_half_the_memory(ranks):
    [(held, peaks)] = ranks(half_the_activations_job, size=1)
    tanh = 8 * 8192 * 64
    assert held[0] >= tanh * 4
    assert held[1] / held[0] < 0.6  # the input's cast and the parameters' are the rest
    assert peaks[1] / peaks[0] < 0.6


class Parts(torch.nn.Module):
    """Notes in what dtypes it runs."""

    def __init__(self):
        super().__init__()
        for name in ("weight", "own_weight", "frozen"):
            self.register_parameter(name, torch.nn.Parameter(torch.full((3,), 1.1)))
        self.frozen.requires_grad_(False)
        self.integers = torch.nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
        for name in ("state", "own_state", "replaced"):
            self.register_buffer(name, torch.full((3,), 1.1))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x, **others):
        self.seen = {name: t.dtype for name, t in [*self.named_parameters(), *self.named_buffers()]}
        self.inputs = (x, others)
        with torch.no_grad():
            self.state.add_(1)
            self.own_state.add_(1)
            self.count.add_(1)
            self.replaced = self.replaced + 1
        return (self.weight + self.own_weight + self.frozen).sum() * x.sum()


def dtypes_job(rank, config):
    module = Parts()
    brimful.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, ["own_weight", "own_state"]
    )
    model = wrap(module, mixed_precision=config)
    model(torch.ones(2)).backward()
    return module.seen, model.state_dict(), gradients_of(module)


def test_what_is_ignored_or_no_floating_point_number_is_not_cast(ranks):
    rounded = torch.full((3,), 1.1).to(BF16)
    for seen, state, gradients in ranks(dtypes_job, everything(BF16)):
        low = {"weight", "frozen", "state", "replaced"}
        assert {name for name, dtype in seen.items() if dtype == BF16} == low
        whole = {"module.integers", "module.count"}
        assert {name for name, t in state.items() if t.dtype != FP32} == whole
        assert torch.equal(state["module.state"], (rounded + 1).float())
        assert torch.equal(state["module.replaced"], (rounded + 1).float())
        assert torch.equal(state["module.own_state"], torch.full((3,), 1.1) + 1)
        assert torch.equal(state["module.weight"], torch.full((3,), 1.1))
        assert gradients["weight"].dtype == gradients["own_weight"].dtype == FP32


@pytest.mark.parametrize(
    ("config", "low"),
    [
        (_MixedPrecision(), set()),
        (_MixedPrecision(reduce_dtype=BF16), set()),
        (_MixedPrecision(param_dtype=BF16), {"weight", "frozen"}),
        (_MixedPrecision(buffer_dtype=BF16), {"state", "replaced"}),
    ],
)
def test_each_dtype_is_about_its_own_part(ranks, config, low):
    for seen, _, _ in ranks(dtypes_job, config, size=1):
        assert {name for name, dtype in seen.items() if dtype == BF16} == low


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: object


def inputs_job(rank, config):
    module = Parts()
    model = wrap(module, mixed_precision=config)
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    x = torch.ones(2, requires_grad=True)
    model(
        x, a=[torch.ones(1), 3], b={"c": torch.ones(1, dtype=torch.int64)}, d=Pair(x, "e"), f=packed
    )
    (first, others) = module.inputs
    pair, packed = others["d"], others["f"]
    assert isinstance(pair, Pair) and pair.second == "e" and isinstance(packed, PackedSequence)
    assert first.requires_grad and others["a"][1] == 3
    assert others["b"]["c"].dtype == torch.int64
    return {t.dtype for t in (first, others["a"][0], pair.first, packed.data)}


@dataclasses.dataclass
class Config(_MixedPrecision):
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = True


def test_inputs_of_any_structure_are_cast(ranks):
    assert ranks(inputs_job, everything(BF16), size=1) == [{BF16}]
    assert ranks(inputs_job, Config(BF16), size=1) == [{BF16}]
    assert ranks(inputs_job, Config(BF16, cast_forward_inputs=False), size=1) == [{FP32}]


def direct_job(rank):
    module = made("mlp")
    model = wrap(module, mixed_precision=everything(BF16))
    x = inputs_of("mlp", rank)
    low = copy.deepcopy(module).to(BF16)(x.to(BF16))
    assert model.module(x).dtype == FP32
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            assert torch.equal(model.eval()(x), low)


def test_the_wrapper_evaluates_in_the_lower_precision_and_its_module_does_not(ranks):
    ranks(direct_job, size=1)


def inference_job(rank):
    module = made("conv_bn")
    twin = copy.deepcopy(module)
    model = wrap(module, mixed_precision=everything(BF16))
    x = inputs_of("conv_bn", rank)
    with torch.inference_mode():
        model(x)
    with torch.no_grad():
        wrap(twin, mixed_precision=everything(BF16))(x)
    assert not torch.equal(module[1].running_mean, torch.zeros(4))
    assert torch.equal(module[1].running_mean, twin[1].running_mean)
    loss_of(model(x)).backward()


def test_buffers_follow_a_forward_in_inference_mode(ranks):
    ranks(inference_job, size=1)


def wire_job(rank, config, options):
    model = wrap(made("mlp"), mixed_precision=config, **options)
    loss_of(model(inputs_of("mlp", rank))).backward()
    return model.telemetry()["buckets"][0]["bytes"]


@pytest.mark.parametrize(
    ("config", "options", "element_bytes"),
    [
        (everything(BF16), {}, 2),
        (_MixedPrecision(param_dtype=BF16), {}, 2),
        (_MixedPrecision(param_dtype=BF16), {"wire_dtype": FP32}, 4),
        (_MixedPrecision(param_dtype=BF16), {"error_feedback": True}, 2),
        (_MixedPrecision(reduce_dtype=FP16), {}, 2),
        (everything(BF16, torch.float64), {}, 8),
    ],
)
def test_gradients_travel_in_the_dtype_that_is_asked_for(ranks, config, options, element_bytes):
    # A bucket of three elements, which float32 fills up to 64 bytes.
    found = ranks(wire_job, config, {**options, "bucket_cap_mb": 1e-6, "plan": "registration"})
    assert found == [16 * element_bytes] * 2


def copies_job(rank):
    module = made("attention")
    module.reentrant = False
    model = wrap(module, mixed_precision=everything(BF16))
    x = inputs_of("attention", rank)
    expected = None
    for again in (lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))) * 2:
        model = again(model)
        outputs = model(x)
        assert outputs.dtype == BF16
        loss_of(outputs).backward()
        found = gradients_of(model)
        expected = expected or found
        assert same_bits(found, expected)
        model.zero_grad()
        counts = [len(m._forward_pre_hooks) for m in model.module.modules()]
        assert set(counts) == {1}
    alone = copy.deepcopy(model.module)
    loss_of(alone(x)).backward()  # in float32, its checkpointed blocks too
    exact = copy.deepcopy(module)
    exact.reentrant = None
    loss_of(exact(x)).backward()
    return same_bits(gradients_of(alone), gradients_of(exact))


def test_copies_of_the_wrapper_compute_alike_and_copies_of_the_module_in_float32(ranks):
    assert all(ranks(copies_job))


def dropped_job(rank):
    module = made("attention")
    module.reentrant = False
    x = inputs_of("attention", rank)
    loss_of(module(x)).backward()
    expected = gradients_of(module)
    module.zero_grad()
    model = wrap(module, mixed_precision=everything(BF16))
    loss_of(model(x)).backward()
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
    module.zero_grad()
    loss_of(module(x)).backward()
    assert same_bits(gradients_of(module), expected)
    watched = weakref.ref(module)
    del module
    gc.collect()
    assert watched() is None


def test_a_wrapper_that_is_dropped_leaves_no_hook(ranks):
    ranks(dropped_job, size=1)


def bad_values_job(rank):
    def error(config, **options):
        return raised(wrap, mlp(), mixed_precision=config, **options)

    scripted = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(6, 3)))
    return [
        error(object()),
        error("bfloat16"),
        error(_MixedPrecision(param_dtype="bfloat16")),
        error(_MixedPrecision(reduce_dtype=torch.int32)),
        error(_MixedPrecision(param_dtype=torch.complex64)),
        error(everything(BF16), wire_dtype=FP32),
        error(_MixedPrecision(), error_feedback=True),
        error(Config(BF16, keep_low_precision_grads=True)),
        raised(wrap, scripted, mixed_precision=everything(BF16)),
    ]


BAD_VALUES = [
    (TypeError, "(field: param_dtype, type: object); pass torch.nn.parallel.distributed."),
    (TypeError, "(field: param_dtype, type: str); pass torch.nn.parallel.distributed."),
    (TypeError, "must be a torch.dtype or None (param_dtype: 'bfloat16')"),
    (ValueError, "(reduce_dtype: torch.int32); pass torch.bfloat16 or torch.float16"),
    (ValueError, "(param_dtype: torch.complex64); pass torch.bfloat16 or torch.float16"),
    (
        ValueError,
        "(mixed_precision.reduce_dtype: torch.bfloat16, wire_dtype: torch.float32); leave",
    ),
    (ValueError, "no rounding to feed back"),
    (NotImplementedError, "(keep_low_precision_grads: True); leave it out"),
    (TypeError, "of a TorchScript module (module: 0); leave it unscripted"),
]


def test_bad_values_have_a_remedy(ranks):
    for errors in ranks(bad_values_job, size=1):
        for error, (kind, words) in zip(errors, BAD_VALUES, strict=True):
            assert type(error) is kind, (words, error)
            assert words in str(error)


def mismatch_job(rank):
    config = everything(BF16) if rank.index == 0 else None
    error = raised(wrap, mlp(), mixed_precision=config)
    dist.barrier()
    return error


def test_ranks_that_differ_are_reported(ranks):
    for error in ranks(mismatch_job):
        assert type(error) is brimful.PlanMismatch, error
        assert "reduction dtype: BFloat16" in str(error)
