import torch
from leak_loop import steps


class Metric:
    def __init__(self):
        self.predictions = []
        self.count = torch.zeros(1)

    def update(self, value):
        copies = [item.detach().clone() for item in self.predictions]  # holder: metric.predictions
        self.predictions = [value]
        self.count = self.count + 1
        self.predictions = copies + self.predictions


metric = Metric()
for _ in steps():
    metric.update(torch.randn(32, 64))
# advice: bound `metric.predictions`
