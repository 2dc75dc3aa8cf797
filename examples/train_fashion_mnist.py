"""Two ranks train a small CNN on Fashion-MNIST with less memory than the batch needs.

    torchrun --standalone --nproc-per-node 2 examples/train_fashion_mnist.py

Each rank may use 32 MiB of CPU memory for tensors, and asks for batches that need more. In the
middle of the run rank 1 really runs out of memory inside backward, after gradients have left for
the other rank, and from then on has half of its budget. The job goes on, and the ranks end with
the same parameters, bit for bit. `main` is the training loop; the rest is what it trains, what goes
wrong on purpose, and (in training_report.py) what it shows.
"""

import argparse
import datetime
import math
import sys

import fashion_mnist
import torch
import torch.distributed as dist
import torch.nn.functional as F
import training_report

import brimful
from brimful import memory

MIB = 1 << 20


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = torch.nn.Linear(32 * 7 * 7, 128)
        self.fc2 = torch.nn.Linear(128, 10)

    def forward(self, images):
        x = (images.float() - 73) / 90  # mean and standard deviation of the pixels
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def loss_fn(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main(args):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    images, labels = fashion_mnist.load("train", args.data)
    test = fashion_mnist.load("t10k", args.data)
    mine = fashion_mnist.share(min(args.samples, len(images)), rank, world_size)
    loader = list(zip(images[mine].split(args.batch), labels[mine].split(args.batch), strict=True))

    net = Net()
    save(args.save_initial, net)
    needed = bytes_needed(net, loader[0], args.batch)
    memory.set_limit("cpu", args.budget_mib * MIB)
    # Buckets this small only because the model is: several of them leave one after another.
    model = brimful.DistributedDataParallel(net, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sizer = brimful.BatchSizer(model, optimizer)

    report = training_report.Report(args, needed, len(images[mine]), len(loader))
    shortage = Shortage(model, report, rank == args.fault_rank, at_step=report.steps_in_all // 2)
    for epoch in range(args.epochs):
        for batch in sizer.batches(loader):
            outcome = sizer.step(batch, loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            shortage.after_step()
            report.after_step(epoch, batch, outcome)
        report.after_epoch(epoch, accuracy(net, test, rank, world_size))

    save(args.save_final, net)
    same = report.finish(largest_difference(net))
    dist.destroy_process_group()
    return 0 if same else 1


class Shortage:
    """Takes memory away from one rank, once, inside backward.

    It does so in the gradient hook of an early layer, which runs late in backward, in the last piece of the batch: the
    first bucket is launched, and the backward of the layers below still has to allocate. Half of the budget comes back
    after the step.
    """

    def __init__(self, model, report, here, at_step):
        self.model, self.report, self.steps_before = model, report, at_step
        self.budget = memory.stats("cpu").limit_bytes
        self.state = "waits" if here else "over"
        model.module.conv2.weight.register_hook(self.on_gradient)

    def on_gradient(self, _gradient):
        if self.state == "waits" and self.steps_before <= 0 and self.model.buckets_launched > 0:
            self.state = "cut"
            used = memory.stats("cpu").used_bytes
            memory.set_limit("cpu", used)
            self.report.after_cut(used, self.model.buckets_launched)

    def after_step(self):
        self.steps_before -= 1
        if self.state == "cut":
            self.state = "over"
            memory.set_limit("cpu", self.budget // 2)


def bytes_needed(net, batch, rows):
    """Memory of a step with `rows` rows unsplit, from the peaks of two small ones."""
    images, labels = batch

    def peak_of(count):
        net.zero_grad()
        memory.reset_peak("cpu")
        loss_fn(net, (images[:count], labels[:count])).backward()
        return memory.stats("cpu").peak_bytes

    peak_of(1)  # the libraries' own buffers
    small, large = peak_of(16), peak_of(32)
    net.zero_grad()
    memory.reset_peak("cpu")
    return small + (large - small) * (rows - 16) // 16


@torch.no_grad()
def accuracy(net, test, rank, world_size):
    """Share of the test images that the model gets right; each rank tries some of them."""
    images, labels = test
    right = torch.zeros(1, dtype=torch.int64)
    for some, answers in zip(
        images.split(100)[rank::world_size], labels.split(100)[rank::world_size], strict=True
    ):
        right += (net(some).argmax(1) == answers).sum()
    dist.all_reduce(right)
    return right.item() / len(labels)


@torch.no_grad()
def largest_difference(net):
    """Between any rank's parameters and those of rank 0."""
    largest = torch.zeros(1)
    for parameter in net.parameters():
        of_rank_0 = parameter.clone()
        dist.broadcast(of_rank_0, 0)
        difference = (parameter - of_rank_0).abs().nan_to_num(nan=math.inf)
        largest = torch.maximum(largest, difference.max())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def save(path, net):
    """Writes the parameters, as the C++ program in cpp_app reads and writes them too."""
    if path and dist.get_rank() == 0:
        torch.save(tuple((name, value.detach()) for name, value in net.named_parameters()), path)


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--batch", type=int, default=512, help="samples per rank and step (default: 512)"
    )
    parser.add_argument(
        "--samples", type=int, default=60000, help="train on the first SAMPLES images only"
    )
    parser.add_argument(
        "--budget-mib", type=int, default=32, help="memory for tensors, per rank (default: 32)"
    )
    parser.add_argument(
        "--fault-rank", type=int, default=1, help="the rank that loses memory (default: 1)"
    )
    parser.add_argument(
        "--no-fault", dest="fault_rank", action="store_const", const=-1, help="nobody loses memory"
    )
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        help="the four .gz files of Fashion-MNIST (default: Debian's)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result to FILE")
    parser.add_argument(
        "--save-initial", metavar="FILE", help="write the parameters before training to FILE"
    )
    parser.add_argument(
        "--save-final", metavar="FILE", help="write the parameters after training to FILE"
    )
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main(parse_arguments()))
    except FileNotFoundError as error:
        sys.exit(str(error))
