"""brimful.search in a study of Optuna."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import brimful
from brimful import memory, search

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)

pytestmark = pytest.mark.timeout(300)
LIMIT = 24 << 20
BATCHES = [64, 256, 4096]


@pytest.fixture(autouse=True)
def _no_limit():
    yield
    memory.set_limit("cpu", None)


def loss_fn(model, batch):
    return model(batch).square().mean()


def objective(trial, with_sizer=False):
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 10))
    batch = torch.randn(trial.suggest_categorical("batch_size", BATCHES), 64)
    if with_sizer:
        return brimful.BatchSizer(model).step(batch, loss_fn).loss
    loss = loss_fn(model, batch)
    loss.backward()
    return loss.item()


def grid_study(**options):
    return optuna.create_study(
        sampler=optuna.samplers.GridSampler({"batch_size": BATCHES}, seed=0), **options
    )


def by_batch(study):
    return {trial.params["batch_size"]: trial for trial in study.trials}


def test_a_study_of_feasible_and_infeasible_trials_goes_on():
    study = grid_study()
    study.optimize(search.guard(objective, "report", limit=LIMIT))
    trials = by_batch(study)
    states = {batch: trial.state.name for batch, trial in trials.items()}
    assert states == {64: "COMPLETE", 256: "COMPLETE", 4096: "PRUNED"}
    assert study.best_trial.params["batch_size"] != 4096
    constraint = search.memory_constraint(LIMIT)
    assert {batch: constraint(trial)[0] > 0 for batch, trial in trials.items()} == {
        64: False,
        256: False,
        4096: True,
    }
    assert trials[4096].user_attrs["oom"] == 1
    assert "CPU out of memory" in trials[4096].user_attrs["oom_message"]
    if hasattr(optuna.trial.Trial, "set_constraint"):
        infeasible = {batch: trial.constraints["memory"] > 0 for batch, trial in trials.items()}
        assert infeasible == {64: False, 256: False, 4096: True}


def test_split_completes_all_trials_with_the_batch_that_was_asked_for():
    study = grid_study()
    study.optimize(search.guard(lambda trial: objective(trial, True), limit=LIMIT))
    trials = by_batch(study)
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}
    assert {b: t.user_attrs["effective_batch"] for b, t in trials.items()} == {
        b: b for b in BATCHES
    }
    assert trials[64].user_attrs["pieces"] == 1 < trials[4096].user_attrs["pieces"]
    constraint = search.memory_constraint(LIMIT)
    assert all(constraint(trial)[0] <= 0 for trial in study.trials)


def test_report_prunes_before_the_first_step_of_a_sizer():
    study = grid_study()
    study.optimize(search.guard(lambda trial: objective(trial, True), "report", limit=LIMIT))
    trial = by_batch(study)[4096]
    assert trial.state.name == "PRUNED"
    assert trial.user_attrs["effective_batch"] == 0
    assert trial.user_attrs["peak_bytes"] > LIMIT


@pytest.mark.filterwarnings("ignore:.*constraints_func.*:FutureWarning")
def test_tpe_takes_the_constraint_and_leaves_infeasible_trials():
    def choose(trial):
        trial.suggest_int("width", 1, 1000)
        if trial.params["width"] > 300:
            raise torch.OutOfMemoryError("as if")
        return -float(trial.params["width"])

    sampler = optuna.samplers.TPESampler(
        seed=0, n_startup_trials=10, constraints_func=search.memory_constraint(LIMIT)
    )
    study = optuna.create_study(sampler=sampler)
    study.optimize(search.guard(choose), n_trials=50)
    assert len(study.trials) == 50
    assert {trial.state.name for trial in study.trials} == {"COMPLETE", "PRUNED"}
    assert study.best_trial.params["width"] <= 300
    late = [trial.state.name for trial in study.trials[25:]]
    assert late.count("COMPLETE") > 0.4 * len(late)  # of random ones 0.3 would be


def test_pruning_of_the_objective_and_its_errors_are_passed_on():
    def pruned(trial):
        raise optuna.TrialPruned

    study = optuna.create_study()
    study.optimize(search.guard(pruned), n_trials=1)
    assert study.trials[0].state.name == "PRUNED"
    assert study.trials[0].user_attrs["oom"] == 0

    def wrong(trial):
        raise KeyError("lr")

    with pytest.raises(KeyError):
        study.optimize(search.guard(wrong), n_trials=1)
    with pytest.raises(torch.OutOfMemoryError):
        study.optimize(search.guard(objective, "raise", limit=1 << 20), n_trials=1)
    with pytest.raises(ValueError, match="leave peaks out"):
        study.optimize(search.guard(objective, "report", peaks={64: 1}), n_trials=1)
