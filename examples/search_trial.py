"""What search.py searches: a small CNN, and an ordinary training loop with a BatchSizer.

A module of its own, since Ray's workers import it; what is in the script itself they get as a copy.
"""

import functools
import itertools

import fashion_mnist
import torch
import torch.nn.functional as F

import brimful
from brimful import search

METRIC = "accuracy"


class Net(torch.nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        sizes = [1] + [width] * depth
        self.convolutions = torch.nn.ModuleList(
            torch.nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(sizes)
        )
        self.head = torch.nn.LazyLinear(10)

    def forward(self, images):
        x = (images.float() - 73) / 90  # mean and standard deviation of the pixels
        for convolution in self.convolutions:
            x = F.max_pool2d(F.relu(convolution(x)), 2)
        return self.head(x.flatten(1))


def loss_fn(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


@functools.cache
def data(samples):
    (images, labels), test = fashion_mnist.load("train"), fashion_mnist.load("t10k")
    return images[:samples], labels[:samples], *(part[:1000] for part in test)


def build(config):
    """What search.probe asks for: a model, a batch of it, its loss and its optimizer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels, *_ = data(config["samples"])
    width, depth, batch = (
        int(config[name]) for name in ("width", "depth", "batch_size")
    )  # not BOHB's int64
    model = Net(width, depth)
    model(images[:1])  # the head's size
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    return model, (images[:batch], labels[:batch]), loss_fn, optimizer


def train(config):
    """Yields what there is to report after each epoch."""
    model, _, _, optimizer = build(config)
    images, labels, *test = data(config["samples"])
    sizer = brimful.BatchSizer(model, optimizer)
    batch = int(config["batch_size"])
    for _ in range(config["epochs"]):
        for piece in zip(images.split(batch), labels.split(batch), strict=True):
            sizer.step(piece, loss_fn)
            optimizer.step()
            optimizer.zero_grad()
        yield {METRIC: accuracy(model, *test), **search.facts()}


def accuracy(model, images, labels):
    found = brimful.map_batches(model, images, pieces=10)
    return (found.argmax(1) == labels).float().mean().item()
