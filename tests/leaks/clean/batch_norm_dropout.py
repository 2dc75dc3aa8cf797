import torch
from leak_loop import steps

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3),
    torch.nn.BatchNorm2d(8),
    torch.nn.ReLU(inplace=True),
    torch.nn.Dropout(),
)
optimizer = torch.optim.RMSprop(model.parameters())
for _ in steps():
    optimizer.zero_grad()
    model(torch.randn(4, 3, 16, 16)).square().mean().backward()
    optimizer.step()
