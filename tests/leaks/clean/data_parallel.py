import tempfile

import torch
from leak_loop import steps

import brimful

with tempfile.NamedTemporaryFile() as store:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store.name}", rank=0, world_size=1
    )
    try:
        model = brimful.DistributedDataParallel(torch.nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in steps():
            optimizer.zero_grad()
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
    finally:
        torch.distributed.destroy_process_group()
