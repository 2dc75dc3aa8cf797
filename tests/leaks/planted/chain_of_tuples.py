import torch
from leak_loop import steps

model = torch.nn.Linear(64, 10)
seen = {"all": ()}
for _ in steps():
    with torch.no_grad():
        seen["all"] = (seen["all"], model(torch.randn(32, 64)))  # holder: seen['all']
# advice: cut the chain that begins at `seen['all']`
