import torch
from leak_loop import steps


class Memory(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 64))
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x):
        old = self.seen * 0.9
        with torch.no_grad():
            self.seen = torch.cat([old, self.linear(x).sigmoid()])  # holder: model.seen
        return self.linear(x)


model = Memory()
optimizer = torch.optim.Adam(model.parameters())
for _ in steps():
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
# advice: bound what `model.seen` keeps
