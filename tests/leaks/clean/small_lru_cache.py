import functools

import torch
from leak_loop import steps


@functools.lru_cache(maxsize=12)
def mask(number):
    return torch.ones(64, 64).tril()


for number in steps():
    mask(number).sum()
