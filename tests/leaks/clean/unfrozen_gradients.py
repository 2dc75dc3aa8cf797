import torch
from leak_loop import steps


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


net = Net().requires_grad_(False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
for number in steps():
    if number < len(net.layers):
        net.layers[-1 - number].requires_grad_(True)
    optimizer.zero_grad(set_to_none=False)
    net(torch.randn(8, 32)).backward()
    optimizer.step()
