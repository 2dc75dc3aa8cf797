import torch
from leak_loop import steps

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def evaluate():
    outputs = []
    for _ in steps():
        outputs.append(model(torch.randn(32, 64)))  # holder: outputs


evaluate()
# advice: put tensor.detach() into `outputs`
# advice: run it under torch.no_grad()
