import torch
from leak_loop import steps


def features(number):
    features.cache[number] = torch.randn(64, 64)  # holder: features.cache
    return features.cache[number]


features.cache = {}
for number in steps():
    features(number).sum()
# advice: bound `features.cache` (it has one more key after each step)
