"""Lightning's Trainer: light.py FOLDER

16 bits with a scaler, checkpoints of the best epoch and the last, early stopping, a test with the best one.
"""

import json
import os
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from torch import nn
from torch.nn import functional as F

folder = sys.argv[1]


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)
        )

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Allocated(callbacks.Callback):
    """After the last batch: Lightning gives the device back at the end of a fit."""

    bytes = 0

    def on_train_batch_end(self, *_):
        self.bytes = torch.cuda.memory_allocated()


data = torch.utils.data.TensorDataset(torch.randn(64, 32), torch.randint(0, 4, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=16)
allocated = Allocated()
best = callbacks.ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, save_last=True)
trainer = pl.Trainer(
    accelerator="gpu",
    devices=1,
    precision="16-mixed",
    max_epochs=3,
    gradient_clip_val=1.0,
    accumulate_grad_batches=2,
    callbacks=[
        allocated,
        best,
        callbacks.EarlyStopping(
            "val_loss", patience=3
        ),  # a loss that is not known is no better, and finite
        callbacks.LearningRateMonitor(),
    ],
    default_root_dir=folder,
    enable_progress_bar=False,
    log_every_n_steps=1,
    logger=pl.loggers.CSVLogger(folder),
)
module = Module()
trainer.fit(module, loader, loader)
assert trainer.current_epoch == 3
last = best.last_model_path
trainer.test(module, loader, ckpt_path="best", verbose=False)
trainer.validate(module, loader, ckpt_path=last, verbose=False)
assert "last.ckpt" in os.listdir(folder)
# Parameters, gradients and two moments.
states = 4 * 4 * sum(p.numel() for p in module.parameters())
print(json.dumps({"states": states, "allocated": allocated.bytes}))
