"""What is wrong is named with its value and a remedy, on every rank; nothing hangs and nothing is lost."""

import concurrent.futures
import math
import re
import threading

import pytest
import torch
import torch.distributed as dist
from models import classes, cross_entropy, dropout_net, rng_states, same_bits, values_of, wrap
from rank_processes import raised

import brimful


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))


GOOD = classes(6)


def with_weight(weight):
    return lambda model, piece: (cross_entropy(model, piece), weight)


def loss_of(value):
    return lambda model, piece: value


# What is wrong: (the batch, the loss function, further arguments, the error's type, its message). Of the arguments
# those in "sizer" are the sizer's.
STEPS = {
    "no rows": (
        (torch.empty(0, 6), torch.empty(0, dtype=torch.long)),
        cross_entropy,
        {},
        ValueError,
        r"the batch is empty \(rows: 0\); pass NO_DATA",
    ),
    "sizes": (
        (torch.randn(5, 6), torch.zeros(4, dtype=torch.long)),
        cross_entropy,
        {},
        ValueError,
        r"disagree in size \(batch\[0\]: 5, batch\[1\]: 4\); give",
    ),
    "nested sizes": (
        {"x": [torch.randn(5, 6)], "y": torch.zeros(4)},
        cross_entropy,
        {},
        ValueError,
        r"disagree in size \(batch\['x'\]\[0\]: 5, batch\['y'\]: 4\)",
    ),
    "no tensor": ("text", cross_entropy, {}, TypeError, r"holds no tensor .*\(type: .*str"),
    "scalars only": (torch.tensor(1.0), cross_entropy, {}, TypeError, r"holds no tensor"),
    "None": (None, cross_entropy, {}, TypeError, r"the batch is None; pass .*NO_DATA"),
    "loss per row": (
        GOOD,
        lambda model, piece: model(piece[0]).sum(1),
        {},
        ValueError,
        r"the loss is not a scalar \(shape: \[6\]\); return its mean",
    ),
    "loss without graph": (
        GOOD,
        lambda model, piece: cross_entropy(model, piece).detach(),
        {},
        ValueError,
        r"the loss needs no gradient \(requires_grad: false\); compute it",
    ),
    "loss is complex": (
        GOOD,
        lambda model, piece: torch.complex(cross_entropy(model, piece), torch.ones(())),
        {},
        TypeError,
        r"the loss is complex \(dtype: .*\); return a real one",
    ),
    "loss is a number": (
        GOOD,
        loss_of(1.0),
        {},
        TypeError,
        r"no tensor \(type: .*float.*\); return",
    ),
    "loss is None": (
        GOOD,
        loss_of(None),
        {},
        TypeError,
        r"no tensor \(type: .*NoneType.*\); return",
    ),
    "three results": (GOOD, loss_of((1, 2, 3)), {}, TypeError, r"a tuple \(length: 3\); return"),
    "weight is negative": (GOOD, with_weight(-2.5), {}, ValueError, r"\(weight: -2.5\)"),
    "weight is NaN": (GOOD, with_weight(math.nan), {}, ValueError, r"\(weight: nan\)"),
    "weight is infinite": (GOOD, with_weight(math.inf), {}, ValueError, r"\(weight: inf\)"),
    "weight is text": (GOOD, with_weight("heavy"), {}, (TypeError, ValueError), r"heavy|weight"),
    "loss_fn": (GOOD, "loss", {}, TypeError, r"loss_fn must be callable \(type: .*str"),
    "a spec that names a missing key": (
        dict(zip("xy", GOOD, strict=True)),
        lambda model, piece: cross_entropy(model, (piece["x"], piece["y"])),
        {"sizer": {"batch_dim": {"x": 0, "z": 1}}},
        ValueError,
        r"batch_dim names an entry that the batch lacks \(key: 'z', batch has: 'x', 'y'\); leave",
    ),
    "a spec that names a missing dimension": (
        GOOD,
        cross_entropy,
        {"sizer": {"batch_dim": (0, 1)}},
        ValueError,
        r"a tensor of the batch lacks the dimension of its rows \(batch\[1\]: ",
    ),
    "split too small": (
        GOOD,
        cross_entropy,
        {"split": [2, 3]},
        ValueError,
        r"split must be positive numbers of rows.* \(sum of split: 5, least: 2, rows: 6\)",
    ),
    "split with nothing": (
        GOOD,
        cross_entropy,
        {"split": [6, 0]},
        ValueError,
        r"split must be positive",
    ),
    "split of text": (
        GOOD,
        cross_entropy,
        {"split": ["6"]},
        TypeError,
        r"split must be .*\(split: ",
    ),
}


def bad_steps_job(rank, names, bad_ranks):
    """One step a case, bad on `bad_ranks`, and a good one after it."""
    model = wrap(dropout_net())
    found = {}
    for name in names:
        batch, loss_fn, arguments, *_ = STEPS[name]
        arguments = dict(arguments)
        spec = arguments.pop("sizer", {})
        sizer = brimful.BatchSizer(model, **spec if rank.index in bad_ranks else {})
        before, random = values_of(model), rng_states()
        if rank.index in bad_ranks:
            found[name] = raised(sizer.step, batch, loss_fn, **arguments)
        else:
            found[name] = raised(sizer.step, GOOD, cross_entropy)
        assert same_bits(values_of(model), before), name
        assert rng_states() == random, name
        assert all(p.grad is None for p in model.parameters()), name
        good = brimful.BatchSizer(model) if spec else sizer
        assert good.step(GOOD, cross_entropy).weight == 12, name
        model.zero_grad()
    return found


def require_words(error, kind, pattern, name):
    assert isinstance(error, kind), (name, error)
    assert not isinstance(error, brimful.RankFailed), (name, error)
    assert re.search(pattern, str(error)), (name, str(error))


@pytest.mark.parametrize("bad_ranks", [(1,), (0,), (0, 1)])
def test_a_bad_step_raises_on_every_rank_and_the_next_one_works(ranks, bad_ranks):
    results = ranks(bad_steps_job, list(STEPS), bad_ranks)
    for name, (*_, kind, pattern) in STEPS.items():
        for rank, found in enumerate(results):
            if rank in bad_ranks:
                require_words(found[name], kind, pattern, name)
            else:
                error = found[name]
                assert type(error) is brimful.RankFailed, (name, error)
                assert error.rank == bad_ranks[0]
                assert re.search(pattern, str(error)), (name, str(error))
                assert error.seconds < 2, name


def no_weight_job(rank, without):
    """Nothing counts on any rank; the ranks in `without` have no data."""
    model = wrap(dropout_net())
    sizer = brimful.BatchSizer(model)
    batch = brimful.NO_DATA if rank.index in without else GOOD
    sizer.step(GOOD, cross_entropy)
    model.zero_grad()
    before, random = values_of(model), rng_states()
    errors = []
    for _ in range(2):
        errors.append(raised(sizer.step, batch, with_weight(0)))
        assert same_bits(values_of(model), before) and rng_states() == random
        assert all(p.grad is None for p in model.parameters())
    assert sizer.step(batch, with_weight(0 if rank.index else 3)).weight == 3  # on one rank it does
    model.zero_grad()
    assert sizer.step(GOOD, cross_entropy).weight == 12
    return errors


@pytest.mark.parametrize("without", [(), (1,)])
def test_weights_that_sum_to_0_over_all_ranks_raise_on_all(ranks, without):
    with_data = "0" if without else "0, 1"
    for errors in ranks(no_weight_job, without):
        for error in errors:
            assert type(error) is ValueError, error
            assert re.search(
                rf"the weights of step 1 sum to 0, .*\(ranks with data: {with_data}\); leave out",
                str(error),
            ), str(error)


def test_no_data_on_any_rank_is_no_error():
    assert brimful.BatchSizer(net()).step(brimful.NO_DATA, cross_entropy).weight == 0


def state_job(rank, case):
    model = wrap(dropout_net())
    optimizer = torch.optim.Adam(model.parameters())
    weights = {"weight_fn": (lambda batch: rank.weight)} if case.startswith("weight_fn") else {}
    rank.weight = 6
    sizer = brimful.BatchSizer(model, optimizer, **weights)
    sizer.step(GOOD, cross_entropy)
    optimizer.step()
    optimizer.zero_grad()
    before, random = values_of(model), rng_states()
    if rank.index == 1:
        if case == "limit":
            brimful.memory.set_limit("cpu", 1000)
        elif case == "gradients":
            next(model.module.parameters()).grad = torch.ones(16, 6)
        else:
            rank.weight = {"weight_fn nan": math.nan, "weight_fn negative": -1}.get(case, "text")
    error = raised(sizer.step, GOOD, cross_entropy)
    brimful.memory.set_limit("cpu", None)
    rank.weight = 6
    assert same_bits(values_of(model), before) and rng_states() == random
    kept = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(kept) == (case == "gradients" and rank.index == 1)
    assert all(torch.equal(gradient, torch.ones(16, 6)) for gradient in kept)
    optimizer.zero_grad()
    assert sizer.step(GOOD, cross_entropy).weight == 12
    return error


@pytest.mark.parametrize(
    ("case", "kind", "pattern"),
    [
        (
            "limit",
            ValueError,
            r"limit is below what .*\(limit: 1000 B, needed .*: 7\.\d KiB\); raise",
        ),
        (
            "gradients",
            ValueError,
            r"a gradient is not empty .*\(shape: \[16, 6\]\); call .*zero_grad",
        ),
        ("weight_fn nan", ValueError, r"the weight of a batch .*\(weight: nan\)"),
        ("weight_fn negative", ValueError, r"the weight of a batch .*\(weight: -1\)"),
        ("weight_fn text", (TypeError, ValueError), r"text|weight"),
    ],
)
def test_a_bad_state_at_the_start_of_a_step_raises_on_every_rank(ranks, case, kind, pattern):
    healthy, bad = ranks(state_job, case)
    require_words(bad, kind, pattern, case)
    assert type(healthy) is brimful.RankFailed and healthy.rank == 1
    assert re.search(pattern, str(healthy)), str(healthy)


def test_a_limit_below_what_is_in_use_is_allowed():
    module = net()
    sizer = brimful.BatchSizer(module)
    ballast = torch.empty(1 << 20)
    brimful.memory.set_limit("cpu", 1 << 20)
    assert brimful.memory.stats("cpu").used_bytes > 1 << 20
    with pytest.raises(brimful.BatchTooLarge, match="no split of the batch fits"):
        sizer.step(GOOD, cross_entropy)
    brimful.memory.set_limit("cpu", None)
    del ballast
    assert sizer.step(GOOD, cross_entropy).weight == 6


def nested_job(rank):
    model = wrap(net())
    sizer = brimful.BatchSizer(model)

    def nested(model, piece):
        call = sizer.plan if rank.calls else sizer.step
        call(piece, cross_entropy)
        return cross_entropy(model, piece)

    before = values_of(model)
    found = []
    for rank.calls in range(2):
        found.append(raised(sizer.step, GOOD, nested if rank.index == 1 else cross_entropy))
        assert same_bits(values_of(model), before)
        assert all(p.grad is None for p in model.parameters())
        assert sizer.step(GOOD, cross_entropy).weight == 12
        model.zero_grad()
    return found


def test_a_step_inside_a_step_is_refused_on_every_rank(ranks):
    for healthy, bad in zip(*ranks(nested_job), strict=True):
        require_words(bad, ValueError, r"step is running already; a step cannot contain", "nested")
        assert type(healthy) is brimful.RankFailed and healthy.rank == 1


def test_a_step_from_a_second_thread_is_refused_there():
    model = net()
    sizer = brimful.BatchSizer(model)
    inside, leave = threading.Event(), threading.Event()

    def waiting(model, piece):
        inside.set()
        assert leave.wait(60)
        return cross_entropy(model, piece)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(sizer.step, GOOD, waiting)
        assert inside.wait(60)
        try:
            state = sizer.state_dict()
            for call, arguments in (
                (sizer.step, (GOOD, cross_entropy)),
                (sizer.plan, (GOOD, cross_entropy)),
                (sizer.load_state_dict, (state,)),
                (lambda: next(sizer.batches([GOOD])), ()),
            ):
                error = raised(call, *arguments)
                require_words(error, ValueError, "another thread is in a call of this sizer", call)
            assert sizer.state_dict() == state
            assert all(p.grad is None for p in model.parameters())
        finally:
            leave.set()
        assert first.result(60).weight == 6
    assert sizer.state_dict()["consumed"] == sizer.state_dict()["steps"] == 1


def test_a_model_on_two_devices_is_refused():
    model = net()
    model[2].to("meta")
    words = r"parameters are on several devices \(devices: cpu and meta\); move them to one"
    require_words(raised(brimful.BatchSizer, model), ValueError, words, "devices")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.empty(2, device="meta"))])
    require_words(raised(brimful.BatchSizer, net(), optimizer), ValueError, words, "optimizer")


def mismatch_job(rank, case):
    if rank.index == 0:
        module = net()
    elif case == "number":
        module = torch.nn.Sequential(*net(), torch.nn.Linear(3, 3))
    elif case == "shape":
        module = net()
        module[2] = torch.nn.Linear(12, 4)
    else:
        module = net()
        module[0] = module[0].double()
    error = raised(brimful.DistributedDataParallel, module)
    good = wrap(net())  # the group still works
    assert brimful.BatchSizer(good).step(GOOD, cross_entropy).weight == 12
    return error


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("number", "'3.weight' is [3, 3]"),
        (
            "shape",
            "on rank 0 parameter 2 '2.weight' is [3, 12] Float, on rank 1 parameter 2 '2.weight' is [4, 12]",
        ),
        (
            "dtype",
            "'0.weight' is [12, 6] Float, on rank 1 parameter 0 '0.weight' is [12, 6] Double",
        ),
    ],
)
def test_models_that_differ_are_refused_on_every_rank(ranks, case, words):
    for error in ranks(mismatch_job, case):
        assert type(error) is brimful.PlanMismatch
        assert words in str(error)
        assert str(error).endswith("build the same model on every rank")


def arguments_job(rank):
    """Wrong arguments of the constructors; no rank may wait for another."""
    frozen = net().requires_grad_(False)
    other = dist.new_group([rank.index])
    model = wrap(net())
    alone = wrap(net(), process_group=other)
    ddp = brimful.DistributedDataParallel
    return [
        raised(ddp, frozen),
        raised(ddp, "model"),
        raised(ddp, net(), device_ids=[0, 1]),
        raised(ddp, net(), mixed_precision=1),
        raised(ddp, net(), bucket_cap_mb=-1),
        raised(ddp, net(), process_group="gloo"),
        raised(brimful.BatchSizer, [model, alone]),
        raised(brimful.BatchSizer, frozen),
        raised(brimful.BatchSizer, "model"),
        raised(brimful.BatchSizer, model, "sgd"),
        raised(brimful.BatchSizer, model, max_retries=-1),
        raised(brimful.BatchSizer, model, pieces=0),
        raised(brimful.BatchSizer, model, pieces="two"),
        raised(brimful.BatchSizer, model, weight_fn=3),
    ]


def test_wrong_arguments_are_refused_at_once(ranks):
    expected = [
        (ValueError, r"no parameter needs a gradient \(parameters: 0\)"),
        (TypeError, r"only a torch.nn.Module can be wrapped \(type: .*str"),
        (ValueError, r"one process drives one device \(device_ids: \[0, 1\]\)"),
        (TypeError, r"mixed_precision lacks a field \(field: param_dtype, type: int\)"),
        (ValueError, r"bucket caps must be positive"),
        (TypeError, r""),
        (
            ValueError,
            r"modules of one step must share rank and world size \(rank: 0 of 1, first.* of 2\)",
        ),
        (ValueError, r"no parameter that needs a gradient \(parameters: 0\)"),
        (TypeError, r"model must be a module or a sequence of modules \(type: "),
        (TypeError, r"optimizer must be a torch.optim.Optimizer or a sequence of them \(type: "),
        (ValueError, r"max_retries must not be negative \(max_retries: -1\)"),
        (ValueError, r"at least one piece \(pieces: 0\)"),
        (TypeError, r""),
        (TypeError, r""),
    ]
    for errors in ranks(arguments_job):
        for error, (kind, pattern) in zip(errors, expected, strict=True):
            require_words(error, kind, pattern, pattern)


def test_what_torch_cannot_do_in_the_core_is_a_not_implemented_error():
    batch = torch.ones(4, 3).to_mkldnn()
    error = raised(brimful.map_batches, lambda piece: piece, batch, pieces=2)
    assert type(error) is NotImplementedError, error
    assert "MkldnnCPU" in str(error)


def test_without_a_process_group_the_remedy_is_named():
    with pytest.raises(
        ValueError,
        match=r"group is not initialised \(process_group: None\); call .*init_process_group",
    ):
        brimful.DistributedDataParallel(net())
