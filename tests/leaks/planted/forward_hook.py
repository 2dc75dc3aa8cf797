import torch
from leak_loop import steps

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def record(into):
    def hook(module, inputs, output):
        into.append(output.clone())  # holder: into

    return hook


def main():
    model[0].register_forward_hook(record([]))
    for _ in steps():
        model(torch.randn(32, 64)).sum().backward()


main()
# advice: remove the hook (handle.remove())
