"""Names that the code in the documentation takes from its reader's program, page by page."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import brimful
from brimful import memory


class SummaryWriter:
    """As TensorBoard's, as far as a monitor calls it."""

    def add_scalar(self, tag, value, step):
        pass


def of(page, rank=0):
    return {"__name__": "__main__", **common(rank), **OF_PAGE.get(page, dict)()}


def common(rank):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model = brimful.DistributedDataParallel(net) if dist.get_world_size() == 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(12, 8), torch.randint(4, (12,))
    return {
        "F": F,
        "SummaryWriter": SummaryWriter,
        "batch": batch,
        "brimful": brimful,
        "device": torch.device("cpu"),
        "images": batch[0],
        "loader": [batch] * 4,
        "loss_fn": lambda model, piece: F.cross_entropy(model(piece[0]), piece[1]),
        "memory": memory,
        "model": model,
        "net": net,
        "optimizer": optimizer,
        "rank": rank,
        "sizer": brimful.BatchSizer(model, optimizer) if dist.get_world_size() == 1 else None,
        "torch": torch,
        "x": batch[0],
        "y": batch[1],
        "train": lambda *_, **__: None,
        "train_step": lambda: F.cross_entropy(model(batch[0]), batch[1]).backward(),
    }


def inputs_alone():
    """A loader whose batches are inputs."""
    inputs = torch.randn(12, 8)
    return {"loader": [inputs] * 4, "target": torch.randint(4, (12,)), "criterion": F.cross_entropy}


def growing_sum():
    return {"loader": [torch.randn(12, 8)] * 12, "loss_fn": torch.mean, "total": 0}


def two_stages():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    stage = nn.Linear(8, 8)
    return {
        "group": dist.group.WORLD,
        "loss_fn": F.mse_loss,
        "model": model,
        "stage": stage,
        "stages": brimful.split_sequential(model, [4, 4]),
        "store": dist.distributed_c10d._get_default_store(),
        "data": torch.utils.data.TensorDataset(torch.randn(192, 8), torch.randn(192, 8)),
        "x": torch.randn(16, 8),
        "y": torch.randn(16, 8),
    }


class Masked(nn.Module):
    def forward(self, x, mask, rotary):
        return x * mask + rotary


def masked_stages():
    x = torch.randn(16, 8, requires_grad=True)
    return {
        "stages": [nn.Linear(8, 8), Masked()],
        "embedding": nn.Embedding(8, 8),
        "head": nn.Linear(8, 8),
        "loss_fn": F.mse_loss,
        "x": x,
        "target": torch.randn(16, 8),
        "mask": torch.ones(16, 8),
        "table": torch.zeros(8),
    }


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(32, 16), nn.Linear(24, 16)
        self.scale = nn.Parameter(torch.tensor(2.0))


def embed(model, piece):
    return F.normalize(model.image(piece[0]), dim=-1), F.normalize(model.text(piece[1]), dim=-1)


def contrastive():
    """What blocks of several ranks have from those before them."""
    if dist.get_world_size() == 1:
        return {}
    model = Towers()
    wrapped = brimful.DistributedDataParallel(model)

    def pair_loss(embeddings):
        scores = model.scale.exp() * embeddings[0] @ embeddings[1].T
        return F.cross_entropy(scores, torch.arange(len(scores)))

    return {
        "Towers": Towers,
        "embed": embed,
        "embed_wrapped": lambda wrapped, piece: embed(wrapped.module, piece),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "pair_loss": pair_loss,
        "rows": 8 + 4 * dist.get_rank(),
        "sizer": brimful.BatchSizer(wrapped),
        "wrapped": wrapped,
    }


def fleet():
    """A store beside the ranks, as long as the names live."""
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    data = torch.utils.data.TensorDataset(torch.randn(192, 8), torch.randint(4, (192,)))
    place = {"store_host": "127.0.0.1", "store_port": served.port}
    return {"served": served, "ranks": 1, "data": data, **place}


def two_sizers():
    sizers = [brimful.BatchSizer(nn.Linear(8, 4)) for _ in range(2)]
    return {"actor_sizer": sizers[0], "critic_sizer": sizers[1]}


OF_PAGE = {
    "docs/data-parallel.md": fleet,
    "docs/memory.md": inputs_alone,
    "docs/metrics.md": two_sizers,
    "docs/monitor.md": inputs_alone,
    "docs/leaks.md": growing_sum,
    "docs/summary.md": lambda: {"batch": torch.randn(12, 8)},
    "docs/pipeline-processes.md": two_stages,
    "docs/pipeline.md": masked_stages,
    "docs/tutorials/contrastive-batches.md": contrastive,
}
