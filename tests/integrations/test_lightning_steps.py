"""What Lightning gets of a training_step in pieces: outputs, logs, metrics, batches left out, closures called again."""

import pytest
import torch
import torch.nn.functional as F
from models import values_of
from trainers import Memory, dataset, net, same, under_torchrun

pytest.importorskip("lightning")
lightning = pytest.importorskip("brimful.integrations.lightning")
pl = pytest.importorskip("lightning.pytorch")
torchmetrics = pytest.importorskip("torchmetrics")
fit = pytest.importorskip("test_with_lightning").fit


class Module(pl.LightningModule):
    def __init__(self, memory=None, **options):
        super().__init__()
        self.net = net()
        self.memory = memory or Memory(1 << 30)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.options = options
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.accuracy(logits, y)
        self.memory.check(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True, **self.options)
        self.log_dict({"largest": logits.max()}, reduce_fx="max", on_epoch=True)
        self.log("right", (logits.argmax(1) == y).sum().float(), reduce_fx="sum", on_epoch=True)
        self.log("sized", loss, on_epoch=True, batch_size=len(x))
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        parts = {"places": y.new_ones(len(y)).float(), "entropy": float(loss)}
        return {
            "loss": loss,
            "logits": logits,
            "parts": parts,
            "rows": len(x),
            "about": "training",
            "nothing": None,
        }

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(outputs)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(dataset(), batch_size=10)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Keep(pl.Callback):
    """What callbacks get of each batch, and loggers of each step."""

    def __init__(self):
        self.outputs, self.losses = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(outputs)
        self.losses.append(float(trainer.callback_metrics.get("loss_step", 0)))


def pair(rank, make, memory, options=None, **more):
    """A run by Lightning's own strategy, and one in pieces."""
    under_torchrun(rank)
    runs = []
    sizers = {"ddp": "ddp", "ours": lightning.BrimfulStrategy(sizer=options or True)}
    for name, strategy in sizers.items():
        module, keep = make(memory if name == "ours" else None), Keep()
        trainer = fit(module, strategy, [keep], devices=rank.size, **more)
        runs.append((trainer, module, keep))
    return runs


def outputs_job(rank):
    (_, plain, theirs), (_, module, keep) = pair(rank, Module, Memory(4), limit_train_batches=3)
    assert same(values_of(module.net), values_of(plain.net))
    assert len(module.seen) == len(keep.outputs) == 3
    for mine, other, at_callback in zip(module.seen, plain.seen, keep.outputs, strict=True):
        assert list(mine) == list(at_callback) and set(mine) == set(other)
        torch.testing.assert_close(mine["loss"], other["loss"])
        torch.testing.assert_close(mine["logits"], other["logits"].detach())
        assert not mine["logits"].requires_grad
        torch.testing.assert_close(mine["parts"]["places"], other["parts"]["places"])
        assert mine["parts"]["entropy"] == pytest.approx(other["parts"]["entropy"])
        assert type(mine["rows"]) is lightning.OfPieces and sum(mine["rows"]) == other["rows"]
        assert mine["about"] == ["training"] * len(mine["rows"])
        assert mine["nothing"] is None
    assert keep.losses == pytest.approx(theirs.losses)


def test_outputs_reach_hooks_and_callbacks_as_those_of_the_batch(ranks):
    ranks(outputs_job, size=1)


def one_piece_job(rank):
    (_, plain, _), (_, module, _) = pair(rank, Module, None, limit_train_batches=2)
    for mine, other in zip(module.seen, plain.seen, strict=True):
        assert mine["rows"] == other["rows"] == 10 and mine["about"] == "training"


def test_outputs_of_a_batch_in_one_piece_are_as_they_were(ranks):
    ranks(one_piece_job, size=1)


def log_job(rank, options):
    (theirs, _, _), (ours, module, _) = pair(rank, lambda m: Module(m, **options), Memory(4))
    assert module.memory.refusals > 0
    expected, found = (
        {name: float(value) for name, value in trainer.callback_metrics.items()}
        for trainer in (theirs, ours)
    )
    assert len(expected) > 5 and found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("size", "options"), [(1, {}), (2, {"sync_dist": True})])
def test_logs_and_metrics_are_those_of_whole_batches(ranks, size, options):
    """The metric counts no row twice that a repeated attempt has seen before; the ranks meet once a log."""
    ranks(log_job, options, size=size)


class OfThisRank(Module):
    """With as many batches of ten rows as are asked for."""

    def __init__(self, batches):
        super().__init__(sync_dist=True)
        self.batches = batches

    def train_dataloader(self):
        return torch.utils.data.DataLoader(dataset(10 * self.batches), batch_size=10)


def uneven_log_job(rank):
    under_torchrun(rank)
    module = OfThisRank((2, 4)[rank.index])
    strategy = lightning.BrimfulStrategy(sizer=True)
    trainer = fit(module, strategy, use_distributed_sampler=False)
    rows = [len(outputs["logits"]) for outputs in module.seen if "logits" in outputs]
    losses = [float(outputs["loss"]) for outputs in module.seen]
    return len(module.seen), rows, losses, float(trainer.callback_metrics["right"])


def test_a_rank_without_data_takes_part_in_logs_over_all_ranks(ranks):
    first, second = ranks(uneven_log_job)
    assert first[0] == second[0] == 4 and (first[1], second[1]) == ([10] * 2, [10] * 4)
    assert first[2] == pytest.approx(second[2])
    assert first[3] + second[3] > 0


class Skips(Module):
    """Batches 1 and 2, by their rows alone."""

    def training_step(self, batch, batch_idx):
        found = super().training_step(batch, batch_idx)
        return None if batch_idx in (1, 2) else found


def skip_job(rank, accumulate, memory):
    more = {"accumulate_grad_batches": accumulate, "limit_train_batches": 6}
    (_, plain, theirs), (trainer, module, keep) = pair(rank, Skips, memory, **more)
    assert same(values_of(module.net), values_of(plain.net))
    assert [bool(outputs) for outputs in keep.outputs] == [True, False, False, True, True, True]
    assert [bool(outputs) for outputs in theirs.outputs] == [bool(o) for o in keep.outputs]
    assert trainer.global_step == 6 // accumulate


@pytest.mark.parametrize("memory", [None, Memory(4)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_whose_step_returns_none_is_left_out(ranks, accumulate, memory):
    ranks(skip_job, accumulate, memory, size=1)


class CallsAgain(Module):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


def closure_job(rank):
    runs = pair(rank, CallsAgain, Memory(4), limit_train_batches=3)
    (_, plain, _), (_, module, _) = runs
    assert all(
        torch.allclose(a, b, atol=1e-4)
        for a, b in zip(values_of(module.net).values(), values_of(plain.net).values(), strict=True)
    )


def test_an_optimizer_that_evaluates_again_gets_the_loss_of_where_it_is(ranks):
    ranks(closure_job, size=1)


class Words(pl.LightningModule):
    """Rows of unequal lengths, in the usual dict."""

    def __init__(self, memory=None):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = torch.nn.Embedding(20, 6), torch.nn.Linear(6, 20)
        self.memory, self.seen, self.widths = memory, [], []

    def training_step(self, batch, batch_idx):
        ids = batch["input_ids"]
        self.widths.append(ids.shape[1])
        if self.memory is not None:
            self.memory.check(ids)
        scores = self.head(self.words(ids))
        loss = F.cross_entropy(
            scores[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100
        )
        self.log("loss", loss, on_step=False, on_epoch=True)
        last = scores[torch.arange(len(ids)), batch["attention_mask"].sum(1) - 1]
        return {"loss": loss, "last": last, "mean": loss.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(outputs)

    def train_dataloader(self):
        lengths = torch.tensor([[3, 12, 5, 7, 2, 9], [12, 4, 4, 6, 8, 3]])
        mask = (torch.arange(12) < lengths[..., None]).long()
        ids = torch.randint(1, 20, mask.shape, generator=torch.Generator().manual_seed(1)) * mask
        labels = ids.masked_fill(mask == 0, -100)
        names = ("input_ids", "attention_mask", "labels")
        rows = zip(ids, mask, labels, strict=True)
        return torch.utils.data.DataLoader(
            [dict(zip(names, row, strict=True)) for row in rows], batch_size=None
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def length_job(rank):
    options = {"by_length": True}
    (theirs, plain, _), (ours, module, _) = pair(rank, Words, Memory(2), options)
    assert min(module.widths) < 12 and module.memory.refusals > 0
    assert same(values_of(module), values_of(plain))
    for mine, other in zip(module.seen, plain.seen, strict=True):
        torch.testing.assert_close(mine["last"], other["last"].detach())
        torch.testing.assert_close(mine["mean"], other["mean"])
    losses = [float(trainer.callback_metrics["loss"]) for trainer in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1])


def test_rows_by_length_come_back_in_the_order_of_the_batch(ranks):
    ranks(length_job, size=1)


class Composed(Module):
    """Its loss is a sum, or a mean over the labels that count."""

    reduction = "sum"

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.memory.check(x)
        labels = torch.where(x[:, 0] > 0, y, -100)
        return F.cross_entropy(self.net(x), labels, reduction=self.reduction)


class Counted(Composed):
    reduction = "mean"

    def train_dataloader(self):
        x, y = dataset()[:]
        labels = torch.where(x[:, 0] > 0, y, -100)
        return torch.utils.data.DataLoader(list(zip(x, labels, strict=True)), batch_size=10)


def composed_job(rank, make):
    (_, plain, theirs), (_, module, keep) = pair(
        rank, globals()[make], Memory(4), limit_train_batches=3
    )
    assert same(values_of(module.net), values_of(plain.net))
    assert [float(o["loss"]) for o in keep.outputs] == pytest.approx(
        [float(o["loss"]) for o in theirs.outputs], rel=1e-4
    )


@pytest.mark.parametrize("make", ["Composed", "Counted"])
def test_a_loss_is_weighed_as_it_is_composed(ranks, make):
    ranks(composed_job, make, size=1)
