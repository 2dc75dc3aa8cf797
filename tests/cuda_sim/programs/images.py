"""A net of convolutions trained by a loop of its own: images.py FOLDER DTYPE

Images from worker processes, channels last, mixed images, stochastic depth, an average of the weights, AMP, GradScaler.
"""

import copy
import json
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

folder, dtype = sys.argv[1], sys.argv[2]
torch.backends.cudnn.benchmark = True


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, k):
        generator = torch.Generator().manual_seed(k)
        return torch.randint(0, 256, (3, 32, 32), generator=generator, dtype=torch.uint8), k % 10


class Residual(nn.Module):
    def __init__(self, width, groups=1):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, groups=groups, bias=False),
            nn.BatchNorm2d(width),
            nn.SiLU(inplace=True),
            nn.Conv2d(width, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, width // 4, 1),
            nn.ReLU(),
            nn.Conv2d(width // 4, width, 1),
            nn.Sigmoid(),
        )

    def forward(self, x):
        y = self.body(x)
        keep = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.9)  # stochastic depth
        return F.silu(x + y * self.squeeze(y) * keep / 0.9)


def net():
    return nn.Sequential(
        nn.Conv2d(3, 128, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(128),
        nn.SiLU(),
        Residual(128, groups=128),
        nn.MaxPool2d(2),
        Residual(128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(128, 10),
    )


def accuracy(output, target, topk=(1, 5)):
    _, found = output.topk(max(topk), 1, True, True)
    correct = found.t().eq(target.reshape(1, -1).expand_as(found.t()))
    return [correct[:k].reshape(-1).float().sum(0) * 100.0 / target.size(0) for k in topk]


class Average:
    """Of a figure."""

    sum, count = 0.0, 0

    def update(self, value, n):
        self.sum, self.count = self.sum + value * n, self.count + n


loader = torch.utils.data.DataLoader(
    Images(), batch_size=8, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True
)
mean = torch.tensor([123.0, 117.0, 104.0], device="cuda").view(1, 3, 1, 1)
model = net().to("cuda", memory_format=torch.channels_last)
ema = copy.deepcopy(model).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
scaler = torch.amp.GradScaler("cuda")
best, steps = -1.0, 0
for _ in range(2):
    losses = Average()
    model.train()
    for images, target in loader:
        images = images.to("cuda", non_blocking=True).float().sub_(mean).div_(58)
        target = target.to("cuda", non_blocking=True)
        images = images.contiguous(memory_format=torch.channels_last)
        lam = 0.7
        images = images.mul(lam).add_(images.flip(0), alpha=1 - lam)
        soft = F.one_hot(target, 10).float() * lam + F.one_hot(target.flip(0), 10).float() * 0.3
        with torch.amp.autocast("cuda", dtype=getattr(torch, dtype)):
            loss = torch.sum(-soft * F.log_softmax(model(images), dim=-1), dim=-1).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.synchronize()
        steps += 1
        with torch.no_grad():
            torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 0.001)
        losses.update(loss.item(), len(images))
    schedule.step()
    top1 = Average()
    with torch.inference_mode():
        for images, target in loader:
            images, target = images.cuda().float(), target.cuda()
            with torch.amp.autocast("cuda", dtype=getattr(torch, dtype)):
                output = ema(images)
            top1.update(accuracy(output, target)[0].item(), len(images))
    if top1.sum / top1.count > best:
        best = top1.sum / top1.count
        torch.save({"model": model.state_dict(), "ema": ema.state_dict()}, f"{folder}/best.pth")
        os.replace(f"{folder}/best.pth", f"{folder}/model_best.pth.tar")
assert steps == 6
found = {
    "parameters": sum(p.numel() for p in model.parameters()),
    "copies": 4,  # themselves, their average, their gradients and the momentum
    "allocated": torch.cuda.memory_allocated(),
}
print(json.dumps(found))
