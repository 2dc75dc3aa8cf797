"""A pipeline as a module: its parameters' names, its state, its modes, its schedules and what it is given."""

import copy
import os
import re
import signal
import time

import pytest
import torch
import torch.nn.functional as F
from models import gradients_of, relative_difference
from test_pipeline import check, data, net, whole
from torch import nn

import brimful
from brimful import Pipeline, Schedule, split_sequential
from brimful.pipeline import pop, stash

pytestmark = pytest.mark.usefixtures("no_limit")


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6))


def same_state(found, expected):
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_cut_model_keeps_its_names():
    model = normed()
    pipe = Pipeline(split_sequential(model, [2, 2]))
    assert list(pipe.parameters()) == list(model.parameters())
    assert dict(pipe.named_parameters()) == dict(model.named_parameters())
    same_state(pipe.state_dict(), model.state_dict())
    other = normed()
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.add_(1)
    assert pipe.load_state_dict(other.state_dict()) == ([], [])
    same_state(model.state_dict(), other.state_dict())
    model.load_state_dict(pipe.state_dict())
    assert pipe.state_dict(keep_vars=True)["0.weight"] is model[0].weight
    assert pipe.eval() is pipe and not any(m.training for m in model)
    pipe.train()
    assert all(layer.training for layer in model)


def test_names_that_two_stages_have_begin_with_the_stages_number():
    torch.manual_seed(0)
    stages = [nn.Linear(6, 6), torch.compile(nn.Linear(6, 6)), normed()]
    plain = nn.Sequential(stages[0], stages[1]._orig_mod, stages[2])
    pipe = Pipeline(stages)
    same_state(pipe.state_dict(), plain.state_dict())
    pipe.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
    assert [name for name, _ in pipe.named_parameters()] == [n for n, _ in plain.named_parameters()]


def test_functions_and_shared_weights_have_names_too():
    a, b = nn.Linear(6, 6), nn.Linear(6, 6)
    b.weight = a.weight
    pipe = Pipeline([lambda x: b(a(x)), nn.Sequential(a)])
    assert {id(p) for p in pipe.parameters()} == {id(a.weight), id(a.bias), id(b.bias)}
    assert len(list(pipe.parameters())) == 3
    state = pipe.state_dict()
    assert len(state) == 4  # of the one that both have once
    pipe.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    assert not any(p.any() for p in [*a.parameters(), *b.parameters()])


def test_a_state_that_does_not_fit_is_named():
    model = net()
    pipe = Pipeline(split_sequential(model, [2, 2]))
    state = model.state_dict()
    del state["2.bias"]
    state["9.weight"] = torch.zeros(2)
    with pytest.raises(RuntimeError, match=r"missing keys: 2.bias; keys of no stage: 9.weight"):
        pipe.load_state_dict(state)
    assert pipe.load_state_dict(state, strict=False) == (["2.bias"], ["9.weight"])
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias"):
        pipe.load_state_dict({**model.state_dict(), "0.bias": torch.zeros(7)}, strict=False)
    with pytest.raises(TypeError, match=r"state must be a dict by name \(state: 3\)"):
        pipe.load_state_dict(3)


def test_an_optimizer_takes_a_pipelines_parameters():
    model, reference = net(), net()
    x, y = data()
    pipe = Pipeline(split_sequential(model, [2, 2]), loss_fn=F.mse_loss, microbatches=4)
    pairs = [(pipe, torch.optim.SGD(pipe.parameters(), 0.1))]
    pairs.append((None, torch.optim.SGD(reference.parameters(), 0.1)))
    for _ in range(3):
        for piped, optimizer in pairs:
            piped.step(x, y) if piped else F.mse_loss(reference(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(pipe.state_dict()[name], value)


def one(microbatches, **options):
    return Pipeline([nn.Linear(6, 6), nn.Linear(6, 6)], microbatches=microbatches, **options)


BAD = {
    "microbatches": (lambda: one(42.0), TypeError, "microbatches must be a whole number (microbatches: 42.0)"),
    "no microbatch": (lambda: one(0), ValueError, "(microbatches: 0)"),
    "too many": (lambda: one(2**70), ValueError, f"(microbatches: {2**70})"),
    "max_retries": (lambda: one(2, max_retries="8"), TypeError, "whole number (max_retries: '8')"),
    "threads": (lambda: one(2, threads_per_rank=1.5), TypeError, "(threads_per_rank: 1.5)"),
    "batch_norm": (lambda: one(2, batch_norm=None), TypeError, "string (batch_norm: None)"),
    "loss_fn": (lambda: one(2, loss_fn=3), TypeError, "must be callable (loss_fn: 3)"),
    "size_fn": (lambda: one(2, size_fn=3, split_fn=len), TypeError, "must be callable (size_fn: 3)"),
    "kwargs_dim": (lambda: one(2, kwargs_dim=1), TypeError, "a dict by name (kwargs_dim: 1)"),
    "a keyword": (lambda: one(2, kwargs_dim={1: 0}), TypeError, "(a key of kwargs_dim: 1)"),
    "tied": (lambda: one(2, tied=["w"]), TypeError, "a dict by name (tied: ['w'])"),
    "a copy": (lambda: one(2, tied={"w": 3}), TypeError, "(w: 3)"),
    "group": (lambda: one(2, group="world"), TypeError, "ProcessGroup (type: <class 'str'>)"),
    "schedule": (lambda: one(2, schedule=3), TypeError, "of a number of microbatches (schedule: 3)"),
    "no schedule": (lambda: one(2, schedule=str), TypeError, "returned no Schedule (type: <class 'str'>)"),
    "stages": (lambda: Pipeline(nn.Linear(6, 6)), TypeError, "cut the model with split_sequential"),
    "a number": (lambda: Pipeline(3), TypeError, "(stages: 3)"),
    "balance": (lambda: split_sequential(net(), 3), TypeError, "(balance: 3)"),
    "halves": (lambda: split_sequential(net(), [1.5, 2.5]), TypeError, "(balance: [1.5, 2.5])"),
    "no Sequential": (lambda: split_sequential(nn.Linear(6, 6), [1]), TypeError, "Linear"),
    "ranks": (lambda: Schedule("1f1b", 2.0, 4), TypeError, "whole number (ranks: 2.0); pass an int"),
    "many": (lambda: Schedule("1f1b", 2, 2**70), ValueError, "microbatches: 2147483647"),
    "a name": (lambda: Schedule(3, 2, 2), TypeError, "(name: 3)"),
    "what is stashed": (lambda: stash("h", 3), TypeError, "stash takes a tensor"),
    "its name": (lambda: stash(3, torch.ones(1)), TypeError, "name must be a string (name: 3)"),
    "what is popped": (lambda: pop(None), TypeError, "name must be a string (name: None)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_named_with_its_value(name):
    call, kind, text = BAD[name]
    with pytest.raises(kind, match=re.escape(text)) as error:
        call()
    assert "incompatible" not in str(error.value) and len(str(error.value)) < 300


NAMES_OF_TORCH = {
    "GPipe": ("gpipe", 1),
    "1F1B": ("1f1b", 1),
    "Interleaved1F1B": ("interleaved_1f1b", 2),
    "LoopedBFS": ("looped_bfs", 2),
    "InterleavedZeroBubble": ("zb_h1", 2),
    "ZBVZeroBubble": ("zbv", 2),
    "DualPipeV": ("dualpipev", 2),
}


@pytest.mark.parametrize("name", NAMES_OF_TORCH)
def test_torchs_names_of_schedules_are_known(name):
    from torch.distributed.pipelining.schedules import get_schedule_class

    own, per_rank = NAMES_OF_TORCH[name]
    expected = Schedule(own, 2, 4, stages_per_rank=per_rank)
    of_class = get_schedule_class(name).__name__
    for given in (name, name.lower(), name.upper(), of_class):
        found = Schedule(given, 2, 4, stages_per_rank=per_rank)
        assert found == expected and found.name == own
    model = net(2 * per_rank)
    check(
        model,
        split_sequential(model, [2] * 2 * per_rank),
        *data(),
        schedule=name,
        devices=["cpu"] * 2,
    )


UNEVEN = """
0F0,1F0,0F1,1F1,0F2,1F2,1B0,0B0,1B1,0B1,1B2,0B2
2F0,2B0,2F1,2B1,2F2,2B2
""".strip()


@pytest.mark.parametrize("communicates", [False, True])
def test_ranks_may_have_different_numbers_of_stages(communicates):
    schedule = Schedule.from_csv(UNEVEN)
    schedule = schedule.with_communication() if communicates else schedule
    assert schedule.check()
    model = net(3)
    pipe = check(
        model,
        split_sequential(model, [2, 3, 1]),
        *data(),
        schedule=schedule,
        devices=["cpu"] * 2,
        microbatches=3,
    )
    x, _ = data()
    torch.testing.assert_close(pipe.forward(x), model(x).detach())
    assert [line.split(":")[0] for line in repr(pipe).splitlines()[1:]] == [
        f"  stage {i} (Sequential)" for i in range(3)
    ]
    with pytest.raises(ValueError, match="is for another pipeline"):
        Pipeline(split_sequential(net(), [2, 2]), schedule=schedule, devices=["cpu"] * 2)
    with pytest.raises(ValueError, match=r"a built-in schedule \(stages: 3, devices: 2\)"):
        Pipeline(split_sequential(model, [2, 3, 1]), devices=["cpu"] * 2)


def uneven(here):
    """Three stages in two processes."""
    rank = here.index
    model = net(3)
    x, y = data()
    loss, gradients = whole(model, x, y)
    stages = split_sequential(model, [2, 3, 1])
    pipe = Pipeline(
        stages[:2] if rank == 0 else stages[2:],
        group=torch.distributed.group.WORLD,
        schedule=Schedule.from_csv(UNEVEN),
        microbatches=3,
        loss_fn=F.mse_loss,
    )
    names = [name for name, _ in pipe.named_parameters()]
    own = {name: gradients[name] for name in names}
    assert set(names) == {n for n in gradients if (int(n[0]) < 5) == (rank == 0)}
    for rows in (11, 2):
        loss, gradients = whole(model, x[:rows], y[:rows])
        outcome = pipe.step(x[:rows], y[:rows])
        assert outcome.loss == pytest.approx(loss, rel=1e-12)
        own = {name: gradients[name] for name in names if name in gradients}
        found = {name: p.grad for name, p in pipe.named_parameters()}
        assert relative_difference(found, own) < 1e-12
        model.zero_grad()
    out = pipe.forward(x)
    assert (out is None) == (rank == 0)
    model.zero_grad()
    trained = Words()
    stages = split_sequential(trained.body, [2, 3, 1])
    trains = Pipeline(
        stages[:2] if rank == 0 else stages[2:],
        group=torch.distributed.group.WORLD,
        schedule=Schedule.from_csv(UNEVEN),
        microbatches=3,
        loss_fn=trained.loss,
    )
    loss, gradients = trained.expected(*words())
    assert trains.step(*words()).loss == pytest.approx(loss, rel=1e-12)
    found = {name: p.grad for name, p in trained.named_parameters() if p.grad is not None}
    assert any(name.startswith("loss") for name in found) == (rank == 1)
    assert relative_difference(found, {name: gradients[name] for name in found}) < 1e-12
    replicas_with_a_trained_loss(rank)
    missing, _ = pipe.load_state_dict(copy.deepcopy(model.state_dict()))
    assert not missing and list(pipe.state_dict()) == [
        name for name in model.state_dict() if (int(name[0]) < 5) == (rank == 0)
    ]
    return True


class Words(nn.Module):
    """Three layers before a loss with parameters and a buffer of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = net(3)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(6, 20, [5, 10], 2.0, dtype=torch.float64)

    def expected(self, x, y):
        """Loss and gradients of the model in one piece; it has none afterwards."""
        loss = self.loss(self.body(x), y).loss
        loss.backward()
        gradients = gradients_of(self)
        self.zero_grad()
        return loss.item(), gradients


def words(rows=11):
    x, _ = data(rows)
    return x, torch.arange(rows) * 3 % 20


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("given", ["module", "function"])
def test_a_loss_may_be_trained(schedule, given):
    model = Words()
    x, y = words()
    loss, gradients = model.expected(x, y)
    loss_fn = model.loss if given == "module" else lambda h, t: model.loss(h, t).loss
    pipe = Pipeline(
        split_sequential(model.body, [2, 2, 2]),
        schedule=schedule,
        microbatches=4,
        loss_fn=loss_fn,
        devices=["cpu"] * 3,
    )
    for _ in range(2):
        assert pipe.step(x, y).loss == pytest.approx(loss, rel=1e-12)
        assert relative_difference(gradients_of(model), gradients) < 1e-12
        model.zero_grad()
    assert len(list(pipe.parameters())) == len(list(model.body.parameters()))


def test_a_loss_that_fails_leaves_its_parameters_as_they_were():
    model = Words()
    x, y = words()
    calls = []

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model.loss
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, h, t):
            self.calls += 1
            calls.append(len(h))
            if len(calls) == 7:  # backwards of this step are behind it
                raise RuntimeError("planted")
            return self.inner(h, t)

    failing = Failing()
    pipe = Pipeline(split_sequential(model.body, [3, 3]), microbatches=4, loss_fn=failing)
    pipe.step(x, y)
    before = {name: gradient.clone() for name, gradient in gradients_of(model).items()}
    with pytest.raises(RuntimeError, match="planted"):
        pipe.step(x, y)
    assert all(torch.equal(g, before[name]) for name, g in gradients_of(model).items())
    assert failing.calls == 4


def replicas_with_a_trained_loss(rank):
    """Replicas whose loss is not reduced are refused, and those whose loss is are trained."""
    group = [torch.distributed.new_group([r]) for r in range(2)][rank]
    model = Words()

    def wrapped(module):
        return brimful.DistributedDataParallel(module, process_group=group)

    stages = [wrapped(stage) for stage in split_sequential(model.body, [3, 3])]
    with pytest.raises(ValueError, match="loss_fn has parameters that no reducer has"):
        Pipeline(stages, loss_fn=model.loss, microbatches=2)
    loss, gradients = model.expected(*words())
    pipe = Pipeline(stages, loss_fn=wrapped(model.loss), microbatches=2)
    assert pipe.step(*words()).loss == pytest.approx(loss, rel=1e-12)
    assert relative_difference(gradients_of(model), gradients) < 1e-12


def test_processes_may_have_different_numbers_of_stages(ranks):
    assert ranks(uneven) == [True, True]


class Costly(nn.Module):
    """Takes time that no other layer takes."""

    def __init__(self, seconds, saves=0):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seconds, self.saves = seconds, saves

    def forward(self, x):
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass
        x = self.linear(x)
        for _ in range(self.saves):
            x = x.exp().tanh()
        return x


@pytest.mark.usefixtures("one_thread")
def test_layers_are_balanced_by_what_they_take():
    slow = nn.Sequential(*(Costly(s) for s in (0.02, 0, 0, 0, 0.02, 0)))
    x = torch.randn(8, 4)
    before = copy.deepcopy(slow.state_dict())
    random = torch.get_rng_state()
    counts = brimful.balance(slow, x, 2)
    assert counts[0] < 5 and counts[0] + counts[1] == 6  # one of the two in each stage
    assert brimful.balance(slow, x, 6) == [1] * 6
    same_state(slow.state_dict(), before)
    assert all(p.grad is None for p in slow.parameters())
    assert torch.equal(torch.get_rng_state(), random) and not slow[0]._forward_hooks

    large = nn.Sequential(*(Costly(0, s) for s in (0, 0, 0, 0, 4)), nn.Linear(4, 4))
    assert brimful.balance(large, torch.randn(4096, 4), 2, by="bytes") == [4, 2]
    wide = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4096), nn.Linear(4096, 1))
    assert brimful.balance(wide, x, 2, by="bytes") == [3, 1]
    pipe = Pipeline(split_sequential(wide, [3, 1]), microbatches=2, loss_fn=F.mse_loss)
    assert pipe.step(x, torch.zeros(8, 1)).loss >= 0


def test_a_model_with_skips_is_balanced():
    class Saving(nn.Module):
        def forward(self, x):
            stash("x", x)
            return x.tanh()

    class Adding(nn.Module):
        def forward(self, x):
            return x + pop("x")

    model = nn.Sequential(Saving(), nn.Linear(4, 4), Adding())
    for by in ("time", "bytes"):
        assert sum(brimful.balance(model, torch.randn(8, 4), 2, by=by)) == 3


@pytest.mark.parametrize(
    "arguments, kind, text",
    [
        ((nn.Linear(4, 4), None, 1), TypeError, "Linear"),
        ((net(), data()[0], 5), ValueError, "(n: 5, layers: 4)"),
        ((net(), data()[0], 2.0), TypeError, "(n: 2.0)"),
        ((net(), data()[0], 2, "size"), ValueError, "(by: 'size')"),
    ],
)
def test_what_cannot_be_balanced_is_named(arguments, kind, text):
    model, sample, n, *by = arguments
    with pytest.raises(kind, match=re.escape(text)):
        brimful.balance(model, sample, n, **({"by": by[0]} if by else {}))


def test_inference_that_fails_leaves_the_gradients_of_the_step_before_alone():
    class Failing(nn.Module):
        fails = False

        def forward(self, x):
            if self.fails:
                raise RuntimeError("no")
            return x

    model, failing = net(), Failing()
    x, y = data()
    pipe = Pipeline([model, failing], microbatches=2, loss_fn=F.mse_loss)
    pipe.step(x, y)
    before = {name: gradient.clone() for name, gradient in gradients_of(model).items()}
    failing.fails = True
    with pytest.raises(RuntimeError, match="no"):
        pipe.forward(x)
    assert all(
        torch.equal(gradient, before[name]) for name, gradient in gradients_of(model).items()
    )


def test_parameters_that_are_unfrozen_later_belong_to_the_step():
    def weighted(output, target):
        return F.mse_loss(output, target), 3.0 * len(target)

    model = net()
    model[0].weight.requires_grad_(False)
    pipe = Pipeline(split_sequential(model, [2, 2]), microbatches=4, loss_fn=weighted)
    pipe.step(*data())
    model.zero_grad()
    model[0].weight.requires_grad_(True)
    _, gradients = whole(model, *data())
    pipe.step(*data())
    assert relative_difference(gradients_of(model), gradients) < 1e-12


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.l1_loss])
def test_nothing_of_a_microbatch_is_held_when_it_is_done(loss):
    in_use = []

    def loss_fn(output, target):
        in_use.append(brimful.memory.stats("cpu").used_bytes)
        return loss(output, target)

    x = torch.randn(64 * 128, 64)
    pipe = Pipeline([nn.Linear(64, 64), nn.Linear(64, 64)], microbatches=64, loss_fn=loss_fn)
    pipe.step(x, x)
    in_use.clear()
    pipe.step(x, x)
    microbatch = 128 * 64 * 4
    # What the threads' own actions take comes and goes; what every microbatch left behind would add up.
    assert min(in_use[-8:]) - min(in_use[8:16]) < 16 * microbatch


# fork() beside other threads is what this is about.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_is_refused_and_ends():
    model = net()
    pipe = check(model, split_sequential(model, [2, 2]), *data())
    child = os.fork()
    if child == 0:
        try:
            pipe.step(*data())
        except ValueError as error:
            code = 3 if "forked" in str(error) else 4
        else:
            code = 5
        try:
            del pipe
        finally:
            os._exit(code)
    signal.alarm(60)
    try:
        _, status = os.waitpid(child, 0)
    finally:
        signal.alarm(0)
    assert os.waitstatus_to_exitcode(status) == 3
