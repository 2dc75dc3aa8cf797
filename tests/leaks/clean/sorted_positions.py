import torch
from leak_loop import steps


class Rotary(torch.nn.Module):
    def forward(self, x):
        self.positions = torch.arange(x.shape[1]).float()
        self.table = torch.outer(self.positions, torch.arange(1, 9)).cos()
        self.mask = torch.ones(x.shape[1], x.shape[1]).tril()
        return x + self.table


model = Rotary()
for number in steps():
    with torch.no_grad():
        out = model(torch.randn(4, 8 * (number + 1), 8))
