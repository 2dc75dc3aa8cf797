"""Searches batch size, width and depth of a small CNN on Fashion-MNIST under too little memory.

A third of the grid needs more than the budget. No trial fails: with --on-oom split it keeps its batch, in pieces; with
--on-oom report it ends as one that cannot win. What is trained is in search_trial.py; `search.guard` is all that these
scripts of Ray Tune and Optuna need. Curves: tensorboard --logdir FOLDER.
"""

import argparse
import itertools
import math
import os
import sys
import tempfile
import time

from search_trial import METRIC, build, train

from brimful import search

MIB = 1 << 20
GRID = {"batch_size": [64, 256, 1024], "width": [8, 16, 32], "depth": [1, 2, 3]}


def search_with_ray(args, budget):
    """Random and grid search, ASHA and BOHB; returns (config, last metrics) of each trial."""
    import ray
    from ray import tune

    def train_fn(config):
        for found in train(config):
            tune.report(found)

    fixed = {"samples": args.samples, "epochs": args.epochs}
    if args.searcher == "grid":
        space = {name: tune.grid_search(values) for name, values in GRID.items()} | {"lr": 0.05}
    else:
        space = {name: tune.choice(values) for name, values in GRID.items()}
        space["lr"] = tune.loguniform(0.01, 0.2)
    options = {"metric": METRIC, "mode": "max", "reuse_actors": True}
    options["num_samples"] = 1 if args.searcher == "grid" else args.trials
    if args.searcher == "asha":
        options["scheduler"] = tune.schedulers.ASHAScheduler(max_t=args.epochs, reduction_factor=2)
    if args.searcher == "bohb":
        from ray.tune.schedulers import HyperBandForBOHB
        from ray.tune.search.bohb import TuneBOHB

        options["search_alg"] = tune.search.ConcurrencyLimiter(TuneBOHB(seed=0), 2)
        options["scheduler"] = HyperBandForBOHB(max_t=args.epochs, reduction_factor=2)
    ray.init(num_cpus=2, object_store_memory=100 * MIB, include_dashboard=False)
    tuner = tune.Tuner(
        search.guard(train_fn, args.on_oom, metric=METRIC, mode="max", limit=budget),
        param_space=space | fixed,
        tune_config=tune.TuneConfig(**options),
        run_config=tune.RunConfig(name=args.searcher, storage_path=args.folder, verbose=0),
    )
    results = tuner.fit()
    print(f"failed trials: {results.num_errors}; the best: {results.get_best_result().config}")
    ray.shutdown()
    return [(result.config, result.metrics) for result in results]


def search_with_optuna(args, budget):
    """TPE and Hyperband, BOHB's parts that are maintained."""
    import optuna
    from torch.utils.tensorboard import SummaryWriter

    def objective(trial):
        config = {name: trial.suggest_categorical(name, values) for name, values in GRID.items()}
        config |= {"lr": trial.suggest_float("lr", 0.01, 0.2, log=True)}
        with SummaryWriter(f"{args.folder}/tpe/trial_{trial.number}") as writer:
            for epoch, found in enumerate(
                train(config | {"samples": args.samples, "epochs": args.epochs})
            ):
                for name, value in found.items():
                    writer.add_scalar(name, value, epoch)
                trial.report(found[METRIC], epoch)
                if trial.should_prune():
                    raise optuna.TrialPruned
        return found[METRIC]

    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.HyperbandPruner(max_resource=args.epochs, reduction_factor=2),
    )
    study.optimize(search.guard(objective, args.on_oom, limit=budget), n_trials=args.trials)
    failed = sum(trial.state.name == "FAIL" for trial in study.trials)
    print(f"failed trials: {failed}; the best: {study.best_trial.params}")
    return [
        (t.params | {"samples": args.samples}, t.user_attrs | {METRIC: t.value or -math.inf})
        for t in study.trials
    ]


def show(trials, peaks, budget):
    head = [
        "batch",
        "width",
        "depth",
        "lr",
        "effective batch",
        "pieces",
        "peak",
        "fraction",
        METRIC,
    ]
    rows = []
    for config, found in sorted(trials, key=lambda trial: -trial[1][METRIC]):
        rows.append(
            [
                *(str(config[name]) for name in GRID),
                f"{config['lr']:.3f}",
                *(str(found[name]) for name in ("effective_batch", "pieces")),
                f"{found['peak_bytes'] / MIB:.1f} MiB",
                f"{search.fraction(peaks(config), budget, 1):.2f}",
                "out of memory" if found["oom"] else f"{found[METRIC]:.1%}",
            ]
        )
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        for row in (head, *rows):
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    else:
        table = Table(title=f"budget {budget / MIB:.1f} MiB")
        for title in head:
            table.add_column(title, justify="right")
        for row in rows:
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 110).print(table)


def main(args):
    begin = time.monotonic()
    of_config = search.probe(build)

    def peaks(config):
        """The whole step's; a learning rate takes no memory."""
        return of_config(
            {**{name: config[name] for name in GRID}, "lr": 0.1, "samples": args.samples}
        )

    needs = sorted(
        peaks(dict(zip(GRID, k, strict=True))) for k in itertools.product(*GRID.values())
    )
    budget = (
        args.budget_mib * MIB if args.budget_mib else needs[len(needs) * 2 // 3 - 1] * 101 // 100
    )
    larger = sum(need > budget for need in needs)
    print(f"{larger} of {len(needs)} configs need more than the budget of {budget / MIB:.1f} MiB")
    searching = search_with_optuna if args.searcher == "tpe" else search_with_ray
    trials = searching(args, budget)
    show(trials, peaks, budget)
    print(
        f"{len(trials)} trials in {time.monotonic() - begin:.0f} s; tensorboard --logdir {args.folder}"
    )


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("searcher", choices=["random", "grid", "asha", "tpe", "bohb"])
    parser.add_argument("--on-oom", choices=["split", "report", "raise"], default="split")
    parser.add_argument("--trials", type=int, default=16, help="not of the grid's 27 (default: 16)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2048, help="to train on (default: 2048)")
    parser.add_argument(
        "--budget-mib", type=int, help="default: what two thirds of the grid fit in"
    )
    parser.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "brimful-search"))
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except (FileNotFoundError, ImportError) as error:
        sys.exit(str(error))
