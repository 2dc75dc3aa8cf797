"""brimful.search in Ray Tune: one small Ray of this machine, with a GPU that is only counted."""

from __future__ import annotations

import math
import sys
import time

import pytest
import torch
from torch import nn

import brimful
from brimful import search

tune = pytest.importorskip("ray.tune")
ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LIMIT = 24 << 20
BATCHES = [64, 128, 4096]  # a third does not fit whole


@pytest.fixture(scope="module", autouse=True)
def _ray():
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(
        num_cpus=2,
        num_gpus=1,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def train(config):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    sizer = brimful.BatchSizer(model, optimizer)
    batch = torch.randn(config["batch_size"], 64), torch.randint(10, (config["batch_size"],))
    for _ in range(2):
        optimizer.zero_grad()
        loss = sizer.step(batch, loss_fn).loss
        optimizer.step()
        tune.report({"loss": loss, **search.facts()})


def run(trainable, folder, space, **options):
    tuner = tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(metric="loss", mode="min", reuse_actors=True, **options),
        run_config=tune.RunConfig(storage_path=str(folder), verbose=0),
    )
    return tuner.fit()


SPACE = {"batch_size": tune.choice(BATCHES), "lr": tune.loguniform(1e-3, 1e-1)}


@pytest.mark.parametrize("on_oom, trials", [("split", 50), ("report", 8)])
def test_no_trial_of_a_random_search_fails(tmp_path, on_oom, trials):
    guarded = search.guard(train, on_oom, metric="loss", limit=LIMIT)
    same_always = tune.search.basic_variant.BasicVariantGenerator(random_state=0)
    results = run(guarded, tmp_path, SPACE, num_samples=trials, search_alg=same_always)
    assert len(results) == trials and results.num_errors == 0
    infeasible = 0
    for result in results:
        asked, found = result.config["batch_size"], result.metrics
        if on_oom == "report" and asked == 4096:
            infeasible += 1
            assert found["oom"] == 1 and found["loss"] == math.inf and found["peak_bytes"] > LIMIT
        else:
            infeasible += found["pieces"] > 1
            assert found["oom"] == 0 and found["effective_batch"] == asked
            assert found["peak_bytes"] <= LIMIT
    assert infeasible >= trials // 4
    best = results.get_best_result()
    assert best.metrics["oom"] == 0 and best.metrics["peak_bytes"] <= LIMIT


def test_a_trial_that_reported_and_ran_out_is_not_the_best(tmp_path):
    def late(config):
        tune.report({"loss": 0.01 if config["greedy"] else 1.0})
        if config["greedy"]:
            torch.empty(LIMIT + 1, dtype=torch.uint8)
        tune.report({"loss": 1.0})

    space = {"greedy": tune.grid_search([True, False, False])}
    guarded = search.guard(late, metric="loss", limit=LIMIT)
    results = run(guarded, tmp_path, space, scheduler=tune.schedulers.ASHAScheduler())
    assert results.num_errors == 0
    assert sum(result.metrics.get("oom", 0) for result in results) == 1
    assert results.get_best_result().config == {"greedy": False}


def wait_until(reached):
    """Until it is so, or for so long that the test fails anyway."""
    end = time.monotonic() + 200
    while not reached() and time.monotonic() < end:
        time.sleep(0.02)


def needs_of(share):
    """The resources of trials that take this share of a GPU."""
    total = 100 << 30
    peak = int(share * total) - search.CUDA_CONTEXT_BYTES
    needs = search.resources({64: peak}, 1.0, total_bytes=total, cpus=0.1)
    assert needs({"batch_size": 64}).required_resources["GPU"] == share
    return needs


@pytest.mark.parametrize("share", [0.5, 0.34, 0.25, 1.0])
def test_ray_has_room_for_as_many_trials_as_their_fraction_allows(share):
    trial = needs_of(share)({"batch_size": 64})
    groups = [trial.to_placement_group() for _ in range(math.floor(1 / share) + 1)]

    def waiting():  # Ray need not place them in the order in which they came
        table = ray.util.placement_group_table
        return [group for group in groups if table(group)["state"] != "CREATED"]

    try:
        wait_until(lambda: len(waiting()) == 1)
        (too_many,) = waiting()
        assert not too_many.wait(0.5)
    finally:
        for group in groups:
            ray.util.remove_placement_group(group)


def test_as_many_trials_run_at_once_as_their_fraction_allows(tmp_path):
    share, at_once = 0.34, 2
    here = tmp_path / "here"
    here.mkdir()

    def meet(config):
        """Stay until as many trials as allowed have been here together, once."""
        mine = here / f"trial-{config['k']}"
        mine.touch()
        together = len(list(here.glob("trial-*")))
        if together >= at_once:
            (here / "all").touch()
        wait_until((here / "all").exists)
        mine.unlink()
        return {"loss": 0.0, "together": together}

    trainable = tune.with_resources(search.guard(meet, metric="loss"), needs_of(share))
    space = {"batch_size": 64, "k": tune.grid_search(list(range(at_once + 2)))}
    results = run(trainable, tmp_path, space)
    assert max(result.metrics["together"] for result in results) == at_once


def test_a_greedy_trial_runs_out_alone_and_its_neighbour_ends(tmp_path):
    greedy_is_here, other_is_here, is_over = (tmp_path / name for name in ("one", "two", "over"))

    def meet(config):
        """Both are there when the greedy one takes more than its share; the other takes its own after that."""
        mine, other = greedy_is_here, other_is_here
        if not config["greedy"]:
            mine, other = other, mine
        mine.touch()
        wait_until(other.exists)
        if not config["greedy"]:
            wait_until(is_over.exists)
        try:
            held = [torch.ones(LIMIT // 8) for _ in range(3 if config["greedy"] else 1)]
        finally:
            is_over.touch()
        return {"loss": held[0].mean().item(), "limit": brimful.memory.stats("cpu").limit_bytes}

    needs = search.resources({64: LIMIT}, 1.0, device="cpu", cpus=0.1)
    trainable = tune.with_resources(search.guard(meet, metric="loss"), needs)
    space = {"batch_size": 64, "greedy": tune.grid_search([True, False])}
    results = run(trainable, tmp_path, space)
    greedy, other = sorted(
        (result.metrics for result in results), key=lambda found: -found["config"]["greedy"]
    )
    assert results.num_errors == 0
    assert greedy["oom"] == 1 and greedy["loss"] == math.inf and greedy["peak_bytes"] <= LIMIT
    assert other["oom"] == 0 and other["loss"] == 1.0 and other["limit"] == LIMIT
    assert results.get_best_result().config["greedy"] is False
