"""Data parallelism under torchrun: ranks.py FOLDER

Ranks on devices of their own, a sampler, normalization over all ranks, gradients in buckets, a mean of the losses,
and a checkpoint that rank 0 writes and all read.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

folder = sys.argv[1]
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl", device_id=torch.device("cuda", local))
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
net = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 10))
net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda(local)
model = DistributedDataParallel(net, device_ids=[local], gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(96, 64), torch.randint(0, 10, (96,)))
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=16, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.cuda(local)), y.cuda(local))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = loss.detach().clone()
    dist.all_reduce(whole, op=dist.ReduceOp.AVG)
    if rank == 0:
        torch.save(model.module.state_dict(), f"{folder}/ddp.pt")
    dist.barrier()
    model.module.load_state_dict(torch.load(f"{folder}/ddp.pt", map_location=f"cuda:{local}"))

used = [total - free for free, total in map(torch.cuda.mem_get_info, range(size))]
assert [taken > 0 for taken in used] == [device == local for device in range(size)], used
found = [None] * size
dist.all_gather_object(found, torch.cuda.memory_allocated())
if rank == 0:
    parameters = sum(p.numel() for p in net.parameters())
    # Themselves, their buckets and two moments. On some ranks torch 2.11 still holds its first buckets.
    known = {"parameters": parameters, "copies": 4, "spare": 1}
    print(json.dumps({**known, "allocated": found[0], "of_others": found[1:]}))
dist.destroy_process_group()
