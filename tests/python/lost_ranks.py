"""What tests share in which a rank dies or hangs."""

from concurrent.futures import ThreadPoolExecutor

KINDS = {"classic": "0", "nccl2": "1"}  # of torch's groups
CLEAN_UP_ONLY = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
CYCLES_A_S = 3 << 29  # about one; 1.6 on the simulated device


def at_once(jobs):
    """Calls all of them, each in a thread: they mostly wait."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]
