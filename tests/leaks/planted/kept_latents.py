import torch
from leak_loop import steps

decoder = torch.nn.Linear(64, 128)
latents = []
for _ in steps():
    latents.append(torch.zeros(8, 64, requires_grad=True))  # holder: latents
    decoder(latents[-1]).square().sum().backward()
# advice: bound `latents` (it grows by its items)
