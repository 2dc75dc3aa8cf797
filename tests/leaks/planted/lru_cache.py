import functools

import torch
from leak_loop import steps


@functools.lru_cache
def mask(number):
    return torch.ones(64, 64).tril()  # holder: mask


for number in steps():
    mask(number).sum()
# advice: give the cache a small maxsize
