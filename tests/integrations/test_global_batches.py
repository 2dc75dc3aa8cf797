"""A GlobalSampler under trainers that own the loop: shares are unequal, and the gradient is that of the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from models import classes, values_of
from trainers import net, same, under_torchrun

import brimful

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
adapter = pytest.importorskip("brimful.integrations.transformers")
test_with_lightning = pytest.importorskip("test_with_lightning")
test_with_transformers = pytest.importorskip("test_with_transformers")
test_uneven_ends = pytest.importorskip("test_uneven_ends")

ROWS, BATCH = 44, 8  # the last step has four rows
SHARES = [6, 2]


def sampler_of(data, lag, **place):
    bounds = {} if place else {"max_rows": SHARES}
    return brimful.GlobalSampler(data, batch_size=BATCH, lag=lag, seed=3, **bounds, **place)


class Global(test_uneven_ends.Own):
    def get_train_dataloader(self):
        sampler = sampler_of(self.train_dataset, lag=4)
        return torch.utils.data.DataLoader(
            self.train_dataset,
            batch_sampler=sampler,
            collate_fn=transformers.default_data_collator,
        )


class OfAll(test_with_lightning.Module):
    def train_dataloader(self):
        data = torch.utils.data.TensorDataset(*classes(ROWS))
        self.sampler = sampler_of(data, lag=4)
        return torch.utils.data.DataLoader(data, batch_sampler=self.sampler)


def one_process(data, epochs=1):
    sampler = sampler_of(data, lag=2, rank=0, world_size=1)
    for _ in range(epochs):
        for rows in sampler:
            yield rows
            sampler.note(None)


def lightning_job(rank):
    under_torchrun(rank)
    module = OfAll()
    strategy = test_with_lightning.lightning.BrimfulStrategy(sizer=True)
    test_with_lightning.fit(module, strategy, max_epochs=2, use_distributed_sampler=False)
    return values_of(module.net), module.sampler.epoch


def test_lightning(ranks):
    first, second = ranks(lightning_job)
    assert same(first[0], second[0])
    module, (x, y) = net(), classes(ROWS)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for rows in one_process(ROWS, epochs=2):
        F.cross_entropy(module(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(first[0], values_of(module))
    assert first[1] == second[1] == 2  # it has learned of all steps


class MeanOfRows(transformers.LlamaForCausalLM):
    """Its loss is a mean over rows, and takes no number of items."""

    accepts_loss_kwargs = False

    def forward(self, input_ids, labels):
        return {"loss": super().forward(input_ids).logits.square().mean()}


def model_of(takes_items):
    net = test_with_transformers.model()
    if not takes_items:
        net.__class__ = MeanOfRows
    return net


def transformers_job(rank, folder, takes_items, accumulation):
    under_torchrun(rank)
    trainer = test_uneven_ends.trainer(
        folder,
        test_with_transformers.sentences(ROWS),
        kind=Global,
        model=model_of(takes_items),
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,
        max_grad_norm=0,
        lr_scheduler_type="constant",
    )
    trainer.add_callback(adapter.BrimfulCallback(trainer))
    trainer.train()
    return values_of(trainer.model)


@pytest.mark.parametrize(("takes_items", "accumulation"), [(True, 1), (False, 1), (True, 2)])
def test_transformers(ranks, tmp_path, takes_items, accumulation):
    first, second = ranks(transformers_job, str(tmp_path), takes_items, accumulation)
    assert same(first, second)
    model, data = model_of(takes_items), test_with_transformers.sentences(ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = list(one_process(ROWS))
    for begin in range(0, len(steps), accumulation):
        rows = [row for step in steps[begin : begin + accumulation] for row in step]
        batch = transformers.default_data_collator([data[row] for row in rows])
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(first, values_of(model))
