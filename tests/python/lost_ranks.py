"""What tests share in which a rank dies or hangs."""

from concurrent.futures import ThreadPoolExecutor

from models import cross_entropy

import brimful

KINDS = {"classic": "0", "nccl2": "1"}  # of torch's groups
CLEAN_UP_ONLY = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
CYCLES_A_S = 3 << 29  # about one; 1.6 on the simulated device


def train(model, sizer, batch):
    """A step of the sizer, or of a plain loop."""
    if sizer:
        sizer.step(batch, cross_entropy)
    else:
        cross_entropy(model, batch).backward()


def require_named(result, lost, words, soon_s, steps=(2,)):
    """The rank that was lost in step 2 was, in time."""
    step, error = result
    assert step in steps, result
    assert type(error) is brimful.RankFailed, error
    assert error.rank == lost, error
    assert "the process group broke in step 2: " in str(error), error
    assert f"rank {lost} {words}" in str(error), error
    assert error.seconds < soon_s, (error.seconds, error)


def at_once(jobs):
    """Calls all of them, each in a thread: they mostly wait."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]
