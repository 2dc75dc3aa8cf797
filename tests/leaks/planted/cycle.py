import gc

import torch
from leak_loop import steps


class State:
    def __init__(self):
        self.values = torch.randn(64, 64)  # holder: State
        self.me = self


def main():
    for _ in steps():
        State().values.sum()


gc.collect()
gc.disable()
try:
    main()
finally:
    gc.enable()
# advice: break the reference cycle
