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
        _system_config={"worker_niceness": 0},  # of 15 a loaded machine would give them nothing
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


def test_as_many_trials_run_at_once_as_their_fraction_allows(tmp_path):
    share, at_once = 0.3, 3
    here = tmp_path / "here"
    here.mkdir()

    def meet(config):
        """Stay until as many trials as allowed have been here together, once."""
        mine = here / f"trial-{config['k']}"
        mine.touch()
        together = len(list(here.glob("trial-*")))
        if together >= at_once:
            (here / "all").touch()
        end = time.monotonic() + 60
        while not (here / "all").exists() and time.monotonic() < end:
            time.sleep(0.02)
        mine.unlink()
        return {"loss": 0.0, "together": together}

    total = 100 << 30
    peak = int(share * total) - search.CUDA_CONTEXT_BYTES
    needs = search.resources({64: peak}, 1.0, total_bytes=total, cpus=0.1)
    assert needs({"batch_size": 64}).required_resources["GPU"] == share
    trainable = tune.with_resources(search.guard(meet, metric="loss"), needs)
    space = {"batch_size": 64, "k": tune.grid_search(list(range(at_once + 2)))}
    results = run(trainable, tmp_path, space)
    assert max(result.metrics["together"] for result in results) == at_once == int(1 / share)
