import torch
from leak_loop import steps

model = torch.nn.Linear(64, 128)
head = torch.nn.Linear(128, 1)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
average = torch.zeros(128)
for _ in steps():
    optimizer.zero_grad()
    features = model(torch.randn(32, 64)).tanh().mean(0)
    average = 0.9 * average + 0.1 * features  # holder: average
    head(average).square().sum().backward(retain_graph=True)
    optimizer.step()
# advice: cut the graph between steps: average = average.detach()
# advice: call backward() without retain_graph=True
