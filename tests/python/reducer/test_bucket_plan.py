"""Bucket plans: learned, tuned, kept; and the times that a step took."""

import json
import logging

import pytest
import torch
import torch.distributed as dist
from models import classes, cross_entropy, gradients_of, same_bits, values_of

import brimful


class Backwards(torch.nn.Module):
    """Layers that are used in the order in which they are registered last to first."""

    def __init__(self, layers=8, width=64):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False) for _ in range(layers)
        )
        self.unused = torch.nn.Parameter(torch.ones(width, width))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


LAYER_MB = 64 * 64 * 4 / 2**20


def step(model, rank, number, set_to_none=True):
    generator = torch.Generator().manual_seed(100 * rank.index + number)
    model(torch.randn(4, 64, generator=generator)).square().mean().backward()
    gradients = gradients_of(model)
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    model.zero_grad(set_to_none)
    return gradients


def learned_job(rank, set_to_none):
    results = []
    for plan in ("ordered", "registration"):
        model = brimful.DistributedDataParallel(
            Backwards(), bucket_cap_mb=1.5 * LAYER_MB, plan=plan
        )
        before = model.plan
        gradients = [step(model, rank, number, set_to_none) for number in range(6)]
        results.append((before, model.plan, gradients, values_of(model)))
        counters = model.reducer.counters
        assert counters.launches == sum_of_buckets(before, model.plan, model, 6)
    (first, learned, mine, values), (unchanged, same, theirs, others) = results
    assert first == unchanged == same == "[[8,7],[6,5],[4,3],[2,1],[0]]"
    assert learned == "[[1,2],[3,4],[5,6],[7,8],[0]]"  # the unused one last
    assert all(same_bits(a, b) for a, b in zip(mine, theirs, strict=True))
    assert same_bits(values, others)
    return values


def sum_of_buckets(before, after, model, steps):
    assert len(json.loads(before)) == len(json.loads(after)) == model.reducer.buckets
    return steps * model.reducer.buckets


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_order_is_learned_without_a_collective_and_changes_no_bit(ranks, set_to_none):
    first, second = ranks(learned_job, set_to_none)
    assert same_bits(first, second)


def accumulated_job(rank):
    """A plan changes while gradients that were kept lie in the old buckets: they come along."""
    gradients = []
    for plan in ("ordered", "registration"):
        model = brimful.DistributedDataParallel(
            Backwards(), bucket_cap_mb=1.5 * LAYER_MB, plan=plan
        )
        x = torch.full((2, 64), 0.1 * (rank.index + 1))
        for _ in range(4):  # never emptied
            model(x).square().mean().backward()
        gradients.append((model.plan, gradients_of(model)))
    assert gradients[0][0] != gradients[1][0]
    return same_bits(gradients[0][1], gradients[1][1])


def test_gradients_that_were_not_emptied_move_to_the_new_plan(ranks):
    assert all(ranks(accumulated_job))


def saved_job(rank, plan):
    model = brimful.DistributedDataParallel(Backwards(), bucket_cap_mb=1.5 * LAYER_MB, plan=plan)
    for number in range(4):
        step(model, rank, number)
    return model.plan, values_of(model)


def test_a_kept_plan_is_taken_and_never_changed(ranks):
    learned, values = ranks(saved_job, "ordered")[0]
    for plan, again in ranks(saved_job, learned):
        assert plan == learned
        assert same_bits(again, values)


def mismatch_job(rank):
    model = Backwards()
    plan = "[[8,7],[6,5],[4,3],[2,1],[0]]" if rank.index == 0 else "[[8,7,6],[5],[4,3],[2,1],[0]]"
    with pytest.raises(brimful.PlanMismatch, match="bucket"):
        brimful.DistributedDataParallel(model, plan=plan)
    with pytest.raises(ValueError, match="parameter: 9"):
        brimful.DistributedDataParallel(model, plan="[[9]]")


def test_plans_that_differ_are_refused_on_every_rank(ranks):
    ranks(mismatch_job)


def tuned_job(rank):
    torch.manual_seed(1)
    width = 800  # 2.4 MiB a layer: 1, 5, 10 MB and all together are different plans
    module = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(6)))
    model = brimful.DistributedDataParallel(module)
    plans = []
    for _ in range(90):
        if model.plan not in plans[-1:]:
            plans.append(model.plan)
        model(torch.ones(2, width)).sum().backward()
        model.zero_grad()
    assert len({json.dumps(json.loads(p)) for p in plans}) >= 3  # some were tried
    text = model.reducer.describe_plan()
    if rank.index == 0:
        assert "ms a MiB" in text and "backward and wait" in text
    last = model.plan
    for _ in range(10):
        model(torch.ones(2, width)).sum().backward()
        assert model.plan == last
        model.zero_grad()
    return plans


def test_sizes_are_tuned_on_all_ranks_alike_and_then_stay(ranks):
    first, second = ranks(tuned_job)
    assert first == second


def failed_steps_job(rank):
    """While a plan is offered, steps fail and are repeated on either rank: no rank changes alone."""
    torch.manual_seed(1)
    model = brimful.DistributedDataParallel(
        Backwards(), bucket_cap_mb=1.5 * LAYER_MB, plan="ordered"
    )
    generator = torch.Generator().manual_seed(0)
    failures = 0
    for number in range(30):
        failing = int(torch.randint(0, 4, (1,), generator=generator))
        try:
            x = torch.full((2, 64), 0.1 * (rank.index + 1) + number)
            out = model(x)
            if failing == rank.index:
                out.register_hook(fail)
            out.square().mean().backward()
        except (RuntimeError, brimful.RankFailed):
            failures += 1
        model.zero_grad()
    assert failures > 3
    plans = [None] * rank.size
    dist.all_gather_object(plans, model.plan)
    assert len(set(plans)) == 1
    assert model.plan.startswith("[[1,2]")


def fail(gradient):
    raise RuntimeError("planted")


def test_a_plan_is_taken_up_by_all_or_none(ranks):
    ranks(failed_steps_job)


# --- Times ---------------------------------------------------------------------------------------


def times_job(rank, path):
    model = brimful.DistributedDataParallel(
        Backwards(), bucket_cap_mb=1.5 * LAYER_MB, plan="registration"
    )
    assert model.telemetry() == {}
    for number in range(70):
        step(model, rank, number)
        if rank.index == 1 and number == 69:
            pass
    slow = torch.nn.Sequential(torch.nn.Linear(64, 64), Slow(0.2 if rank.index == 1 else 0.0))
    late = brimful.DistributedDataParallel(slow)
    for _ in range(3):
        late(torch.ones(1, 64)).sum().backward()
        late.zero_grad()
    assert late.telemetry()["straggler"] == 1
    assert 150 < late.telemetry()["straggler_ms"] < 2000
    if rank.index == 0:
        assert late.telemetry()["wait_ms"] > 100
    times = model.telemetry()
    assert times["step"] == 69
    buckets = times["buckets"]
    assert [b["parameters"] for b in buckets] == [2, 2, 2, 2, 1]
    for bucket in buckets:
        assert bucket["first_ms"] <= bucket["ready_ms"] <= bucket["launch_ms"] <= bucket["done_ms"]
        assert bucket["done_ms"] <= times["total_ms"]
    assert times["bytes"] == sum(b["bytes"] for b in buckets) >= 9 * 64 * 64 * 4
    assert 0 < times["copy_ms"] < times["backward_ms"] < times["total_ms"]
    model.save_timeline(path.format(rank.index))
    return None


class Slow(torch.nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        import time

        time.sleep(self.seconds)
        return x


def test_a_step_reports_its_times_and_the_straggler(ranks, tmp_path):
    ranks(times_job, str(tmp_path / "{}.json"))
    for rank in range(2):
        trace = json.loads((tmp_path / f"{rank}.json").read_text())
        events = trace["traceEvents"]
        spans = [e for e in events if e["ph"] == "X"]
        assert {e["pid"] for e in events} == {rank}
        assert len([e for e in spans if e["name"].startswith("step ")]) == 64  # the last ones
        assert all(e["dur"] >= 0 for e in spans)
        collectives = [e for e in spans if e["tid"] == 2]
        assert len(collectives) == 5 * 64


# --- All gradients at once -----------------------------------------------------------------------


def gradients_job(rank, norm_type, max_norm):
    torch.manual_seed(2)
    modules = []
    for _ in range(2):
        torch.manual_seed(2)
        modules.append(
            torch.nn.Sequential(
                torch.nn.Linear(6, 1100), torch.nn.Linear(1100, 1000), torch.nn.Linear(1000, 3)
            )
        )
    ours = brimful.DistributedDataParallel(modules[0], bucket_cap_mb=0.01)
    theirs = torch.nn.parallel.DistributedDataParallel(modules[1])
    batch = classes(8, seed=rank.index)
    for model in (ours, theirs):
        cross_entropy(model, batch).backward()
    norm = ours.clip_grad_norm_(max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type)
    torch.testing.assert_close(norm, expected)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    with pytest.raises(ValueError, match="max_norm: -1"):
        ours.clip_grad_norm_(-1.0)
    with pytest.raises(ValueError, match="norm_type: 0"):
        ours.clip_grad_norm_(1.0, 0.0)
    return norm.item()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("max_norm", [1e-3, 1e6])
def test_clipping_is_torchs(ranks, norm_type, max_norm):
    first, second = ranks(gradients_job, norm_type, max_norm)
    assert first == second


def nonfinite_job(rank):
    torch.manual_seed(2)
    module = torch.nn.Sequential(
        torch.nn.Linear(6, 1100), torch.nn.Linear(1100, 1000), torch.nn.Linear(1000, 3)
    )
    model = brimful.DistributedDataParallel(module, bucket_cap_mb=0.01)
    names = [name for name, _ in module.named_parameters()]
    for bad in range(len(names)):
        for value in (float("nan"), float("inf")):
            handle = list(module.parameters())[bad].register_hook(spoil(value, rank.index == 1))
            cross_entropy(model, classes(8, seed=rank.index)).backward()
            handle.remove()
            with pytest.raises(FloatingPointError, match=f"parameter: {names[bad]}, step: "):
                model.check_gradients()
            model.zero_grad()
    cross_entropy(model, classes(8, seed=rank.index)).backward()
    model.check_gradients()
    model.zero_grad()
    model.check_gradients()  # there are none


def spoil(value, here):
    def hook(gradient):
        gradient = gradient.clone()
        if here:
            gradient.view(-1)[-1] = value
        return gradient

    return hook


def test_the_first_parameter_that_is_not_finite_is_named(ranks):
    ranks(nonfinite_job)


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def log_job(rank):
    lines = Lines()
    logging.getLogger("brimful").addHandler(lines)
    logging.getLogger("brimful").setLevel(logging.INFO)
    torch.manual_seed(0)
    model = brimful.DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(600, 600, bias=False) for _ in range(5)))
    )
    for _ in range(110):
        model(torch.ones(1, 600)).sum().backward()
        model.zero_grad()
    return len([line for line in lines.lines if "bucket sizes tuned" in line])


def test_tuned_sizes_are_reported_once(ranks):
    assert ranks(log_job) == [1, 0]
