import torch
from leak_loop import steps


class AverageMeter:
    def __init__(self):
        self.sum = 0.0
        self.count = 0

    def update(self, value):
        self.sum = self.sum + value  # holder: meter.sum
        self.count += 1


model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
meter = AverageMeter()
for _ in steps():
    meter.update(model(torch.randn(32, 64)).square().mean())
# advice: use meter.sum += loss.item()
# advice: run it under torch.no_grad()
