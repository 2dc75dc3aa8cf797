"""Training that is asked to stop, dies and comes back: its ranks take rows as they are fast, and a resumed job goes on
with the next row.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or ranks that are started again wait for those before them
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_fleet.py --checkpoint job.pt
    sbatch examples/train_fleet.slurm job.pt

Run it again with the same checkpoint to go on. Exit status: 0 when all epochs are done, and on all ranks 128 +
the signal where it was asked to stop.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import brimful


class Numbered(Dataset):
    """Rows that know their number."""

    def __init__(self, rows):
        torch.manual_seed(0)
        self.x, self.y = torch.randn(rows, 16), torch.randint(4, (rows,))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.x[row], self.y[row], row


class Job:
    """What a checkpoint holds."""

    def __init__(self, options, data):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.model = brimful.DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.sizer = brimful.BatchSizer(self.model, self.optimizer)
        self.sampler = brimful.GlobalSampler(data, batch_size=options.batch)
        self.step = 0
        self.path = options.checkpoint

    def save(self):
        """On all ranks; the file takes its place whole."""
        state = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sizer": self.sizer.state_dict(),
            "sampler": self.sampler.state_dict(),  # steps that were made, whatever a loader fetched
            "step": self.step,
        }
        brimful.save_on_rank0(state, self.path)

    def resume(self):
        if not self.path.exists():
            return
        state = brimful.load(self.path)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sizer.load_state_dict(state["sizer"])
        self.sampler.load_state_dict(state["sampler"])
        self.step = state["step"]


def loss_fn(model, piece):
    return F.cross_entropy(model(piece[0]), piece[1])


def train(options, rank, log):
    data = Numbered(options.rows)
    job = Job(options, data)
    job.resume()
    loader = DataLoader(data, batch_sampler=job.sampler)
    if options.metrics is not None:
        lines = brimful.metrics.JsonLines(options.metrics)
        brimful.metrics.Metrics(sizer=job.sizer, to=[lines])
    while job.sampler.epoch < options.epochs and not brimful.stop_requested():
        for batch in job.sizer.batches(loader):  # ends on all ranks after the same step
            time.sleep(1e-3 * options.ms)
            job.sizer.step(batch, loss_fn)
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.step += 1
            log(job.step, [] if batch is brimful.NO_DATA else batch[2].tolist())
            if job.step % options.every == 0:
                job.save()
            if (rank, job.step) == (options.die_rank, options.die_at) and is_first_run():
                os.kill(os.getpid(), signal.SIGKILL)
    job.save()


def is_first_run():
    counts = "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"
    return not any(int(os.environ.get(name) or 0) for name in counts)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64, help="rows of a step, of all ranks")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--ms", type=float, default=0, help="milliseconds that a step sleeps")
    parser.add_argument("--taken", type=Path, help="folder for the rows of each step")
    parser.add_argument("--metrics", type=Path, help="folder for brimful top --job")
    parser.add_argument("--die-rank", type=int, help="this rank is killed in the first run,")
    parser.add_argument("--die-at", type=int, help="after this step")
    options = parser.parse_args()
    brimful.stop_on(signal.SIGTERM, signal.SIGUSR1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def log(step, rows):
        if options.taken is not None:
            with (options.taken / f"rows-{rank}.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "rows": rows}) + "\n")

    train(options, rank, log)
    dist.destroy_process_group()
    sys.exit(brimful.stop_exit_code() if brimful.stop_requested() else 0)


if __name__ == "__main__":
    main()
