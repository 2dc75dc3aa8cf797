"""A model put on two devices by hand, and the same one as a pipeline: five lines change.

    python examples/model_parallel.py                            # two CPU cores
    python examples/model_parallel.py --devices cuda:0 cuda:1

By hand, one device waits while the other works. The pipeline cuts each batch into microbatches, so that both work at
the same time. `by_hand` and `pipelined` are the two ways; the rest is the model, and what shows that the gradients are
the same, and how long a batch takes for each number of microbatches.
"""

import argparse
import copy
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import brimful

TOLERANCE = 1e-4  # of gradients in float32, against the largest gradient


class Block(nn.Module):
    def __init__(self, channels_in, channels, stride=1):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            norm(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            norm(channels),
        )
        self.short = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.main(x) + self.short(x))


def norm(channels):
    # Not BatchNorm: it would normalise each microbatch by itself, and the gradients would not be the whole batch's.
    return nn.GroupNorm(4, channels)


class TwoDeviceNet(nn.Module):
    """A small ResNet with its first part on one device and the rest on another."""

    def __init__(self, devices, width):
        super().__init__()
        self.devices = devices
        self.seq1 = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            norm(width),
            nn.ReLU(),
            Block(width, width),
            Block(width, width),
        ).to(devices[0])
        self.seq2 = nn.Sequential(
            Block(width, 2 * width, stride=2),
            Block(2 * width, 2 * width),
            Block(2 * width, 4 * width, stride=2),
            nn.AdaptiveAvgPool2d(1),
        ).to(devices[1])
        self.fc = nn.Linear(4 * width, 10).to(devices[1])

    def forward(self, x):
        x = self.seq2(self.seq1(x).to(self.devices[1]))
        return self.fc(x.flatten(1))


def by_hand(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(images, labels):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def pipelined(model, microbatches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stages = [model.seq1, nn.Sequential(model.seq2, nn.Flatten(), model.fc)]  # 1: new
    pipe = brimful.Pipeline(stages, microbatches=microbatches, loss_fn=F.cross_entropy)  # 2: new

    def step(images, labels):
        optimizer.zero_grad()
        outcome = pipe.step(images, labels)  # 3 and 4: forward, loss and backward
        optimizer.step()
        return outcome.loss  # 5

    return step


def main(args):
    devices = [torch.device(device) for device in args.devices]
    torch.set_num_threads(1)  # a CPU device is one core
    torch.manual_seed(0)
    model = TwoDeviceNet(devices, args.width)
    batches = [random_batch(args, devices) for _ in range(args.steps)]
    print(f"devices: {', '.join(args.devices)}    batch: {args.batch} images")

    difference = largest_difference(model, batches[0], max(args.microbatches))
    print(f"largest difference of gradients: {difference:.1e} of the largest gradient\n")
    show_losses(model, batches, max(args.microbatches))
    show_curve(model, batches[0], args)
    if difference > TOLERANCE:
        print(f"the gradients of the two ways differ by more than {TOLERANCE}")
        return 1
    return 0


def random_batch(args, devices):
    images = torch.randn(args.batch, 3, args.image, args.image)
    labels = torch.randint(10, (args.batch,))
    return images.to(devices[0]), labels.to(devices[1])


def largest_difference(model, batch, microbatches):
    """Between the gradients of a batch by hand and in the pipeline, as a share of the largest one."""
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    by_hand(one)(*batch)
    pipelined(other, microbatches)(*batch)
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    largest = max(a.grad.abs().max().item() for a, _ in pairs)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs) / largest


def show_losses(model, batches, microbatches):
    one, other = by_hand(copy.deepcopy(model)), pipelined(copy.deepcopy(model), microbatches)
    print("step   loss by hand   loss of the pipeline")
    for index, batch in enumerate(batches):
        print(f"{index:4}   {one(*batch):12.6f}   {other(*batch):20.6f}")


def show_curve(model, batch, args):
    """The best time of a batch for each number of microbatches; the ways take turns, as the machine may be busy."""
    ways = {0: by_hand(copy.deepcopy(model))}
    ways |= {count: pipelined(copy.deepcopy(model), count) for count in args.microbatches}
    taken = {count: [] for count in ways}
    for turn in range(args.rounds + 1):
        for count, step in ways.items():
            measured = seconds_and_cores(step, batch)
            if turn > 0:  # the first is the warm-up
                taken[count].append(measured)
    best = {count: min(times) for count, times in taken.items()}

    print(
        "\nmicrobatches   images each   seconds a batch   cores used   speed-up   ideal, equal parts"
    )
    for count, (seconds, cores) in best.items():
        name, images = (count, -(-args.batch // count)) if count else ("by hand", args.batch)
        ideal = f"{2 * count / (count + 1):.2f}" if count else ""
        speed_up = best[0][0] / seconds
        row = f"{name:>12}   {images:11}   {seconds:15.4f}   {cores:10.2f}   {speed_up:8.2f}   {ideal:>18}"
        print(row.rstrip())
    if args.devices == ["cpu", "cpu"] and max(cores for _, cores in best.values()) < 1.2:
        print(
            "\nNo way has had two cores to itself: are other programs busy? There is no speed-up without."
        )


def seconds_and_cores(step, batch):
    begin, cpu_begin = time.perf_counter(), time.process_time()
    step(*batch)
    for tensor in batch:
        if tensor.device.type != "cpu":
            torch.accelerator.synchronize(tensor.device)
    seconds = time.perf_counter() - begin
    return seconds, (time.process_time() - cpu_begin) / seconds


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", nargs=2, default=["cpu", "cpu"], help="default: cpu cpu")
    parser.add_argument(
        "--microbatches", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="default: 1 2 4 8 16"
    )
    parser.add_argument("--batch", type=int, default=64, help="images (default: 64)")
    parser.add_argument("--image", type=int, default=24, help="pixels of a side (default: 24)")
    parser.add_argument(
        "--width", type=int, default=16, help="channels to begin with (default: 16)"
    )
    parser.add_argument("--steps", type=int, default=3, help="of the training (default: 3)")
    parser.add_argument("--rounds", type=int, default=4, help="timings of each way (default: 4)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(parse_arguments()))
