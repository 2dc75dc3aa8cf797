import torch
from leak_loop import steps

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
optimizer = torch.optim.Adam(model.parameters())
batches = {}
for number in steps():
    batches["now"] = batch = torch.randn(4, 8 * (number + 1), 16)
    model.last = hidden = model(batch)
    mask = torch.ones(4, batch.shape[1])
    padded = torch.nn.functional.pad(batch, (0, 0, 0, 4))
    loss = (hidden.mean(-1) * mask).square().mean() + padded.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
