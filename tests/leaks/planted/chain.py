import torch
from leak_loop import steps


class Node:
    def __init__(self, value, previous):
        self.value = value
        self.previous = previous


last = None
for _ in steps():
    last = Node(torch.randn(32, 64), last)  # holder: last
# advice: cut the chain that begins at `last`
