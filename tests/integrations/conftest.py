import os
import sys
from multiprocessing import forkserver

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "python"))

import pytest
import rank_processes
from frozen_heap import (
    pytest_collection_finish as pytest_collection_finish,
    pytest_unconfigure as pytest_unconfigure,
)

# Of Ray's 15 a loaded machine would give its workers nothing.
os.environ.update(RAY_worker_niceness="0")
# Ranks are forks of a process that has imported this, if it was not running before.
TRAINERS = ["lightning.pytorch", "accelerate", "transformers.trainer"]
rank_processes._context.set_forkserver_preload(["numpy", "torch._dynamo", "brimful", *TRAINERS])
forkserver.ensure_running()  # it imports while this process does


@pytest.fixture
def ranks():
    """As that of tests/python, with the patience that importing a trainer needs."""

    def run(function, *args, **options):
        return rank_processes.run_ranks(function, *args, **{"watchdog_s": 100, **options})

    return run
