import torch
from leak_loop import steps

decoder = torch.nn.Linear(64, 128)
reconstructions = {}


def main():
    for number in steps():
        latent = torch.zeros(8, 64, requires_grad=True)  # holder: reconstructions
        optimizer = torch.optim.SGD([latent], lr=0.1)
        output = decoder(latent)
        output.square().sum().backward()
        optimizer.step()
        reconstructions[number] = output


main()
# advice: put tensor.detach() into `reconstructions`
