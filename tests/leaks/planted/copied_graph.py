import torch
from leak_loop import steps

model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kept = {"logits": torch.zeros(0, 10), "other": torch.zeros(4)}
for _ in steps():
    optimizer.zero_grad()
    out = model(torch.randn(32, 64))
    out.square().mean().backward()
    optimizer.step()
    kept["logits"] = torch.cat([kept["logits"], out])  # holder: kept['logits']
    kept["other"] = kept["other"] * 0.5
# advice: put kept['logits'].detach() into it
# advice: bound what `kept['logits']` keeps
