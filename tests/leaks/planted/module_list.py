import torch
from leak_loop import steps


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(64, 64)
        self.activations = []

    def forward(self, x):
        hidden = self.inner(x).relu()  # holder: net.activations
        self.activations.append(hidden)
        return hidden.sum()


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in steps():
    optimizer.zero_grad()
    net(torch.randn(32, 64)).backward()
    optimizer.step()
# advice: put tensor.detach() into `net.activations`
