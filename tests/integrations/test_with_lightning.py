"""Lightning's Trainer and Fabric with brimful in the place of torch's class, on two ranks."""

import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import values_of
from trainers import Memory, dataset, is_ours, net, same, under_torchrun

import brimful

pytest.importorskip("lightning")
lightning = pytest.importorskip("brimful.integrations.lightning")
pl = pytest.importorskip("lightning.pytorch")
Fabric = pytest.importorskip("lightning.fabric").Fabric


class Module(pl.LightningModule):
    def __init__(self, memory=None, batch_size=8):
        super().__init__()
        self.net = net()
        self.memory = memory or Memory(1 << 30)
        self.batch_size = batch_size
        self.wrappers = set()

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.wrappers.add(type(self.trainer.strategy.model))
        if not self.memory.late:
            self.memory.check(x)
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss, "rows": len(x)}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.memory.late:
            with torch.enable_grad():
                self.memory.check(batch[0])

    def train_dataloader(self):
        return torch.utils.data.DataLoader(dataset(), batch_size=self.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Module):
    """Two optimizers of a layer each, which step in turn."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer, layer in zip(self.optimizers(), (self.net[0], self.net[2]), strict=True):
            self.toggle_optimizer(optimizer)
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            assert all(p.grad is not None for p in layer.parameters())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[k].parameters(), lr=0.1) for k in (0, 2)]


def fit(module, strategy, callbacks=(), **options):
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        enable_checkpointing=False,
        callbacks=list(callbacks),
        **quiet,
        **{"devices": 2, "max_epochs": 1, "use_distributed_sampler": True, **options},
    )
    trainer.fit(module)
    return trainer


def plain_job(rank):
    under_torchrun(rank)
    results = []
    for strategy in ("ddp", "ddp_brimful"):
        module = Module()
        trainer = fit(module, strategy, limit_train_batches=4, gradient_clip_val=1.0)
        assert trainer.strategy.model is module  # unwrapped again
        assert any(issubclass(w, brimful.DistributedDataParallel) for w in module.wrappers) == (
            strategy == "ddp_brimful"
        )
        results.append(values_of(module.net))
    assert same(*results)
    return results[1]


def test_a_model_is_trained_as_lightnings_own_ddp_trains_it(ranks):
    first, second = ranks(plain_job)
    assert same(first, second)
    assert not same(first, net().state_dict())


class CountSteps(pl.Callback):
    def __init__(self):
        self.counts = []

    def on_train_batch_end(self, trainer, *_):
        self.counts.append(trainer.strategy.model.reducer.counters.steps)


def accumulated_job(rank):
    under_torchrun(rank)
    ours, theirs, steps = Module(), Module(), CountSteps()
    options = {"limit_train_batches": 4, "accumulate_grad_batches": 2}
    fit(ours, "ddp_brimful", [steps], **options)
    fit(theirs, "ddp", **options)
    assert steps.counts == [0, 1, 1, 2]
    assert same(values_of(ours.net), values_of(theirs.net))


def test_gradients_accumulate_without_a_collective(ranks):
    ranks(accumulated_job)


def doubled(state, bucket):
    state.append(bucket.buffer().numel())
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # the sum, not the mean


def hooked_job(rank):
    under_torchrun(rank)
    plain, hooked, state = Module(), Module(), []
    fit(plain, "ddp_brimful", limit_train_batches=1)
    strategy = lightning.BrimfulStrategy(ddp_comm_state=state, ddp_comm_hook=doubled)
    fit(hooked, strategy, limit_train_batches=1)
    assert state
    begin = values_of(net())
    for name, value in values_of(plain.net).items():
        moved = values_of(hooked.net)[name] - begin[name]
        torch.testing.assert_close(moved, 2 * (value - begin[name]), atol=1e-6, rtol=1e-4)


def test_communication_hooks_hold_on_the_cpu(ranks):
    ranks(hooked_job)


def manual_job(rank):
    under_torchrun(rank)
    ours, theirs = Manual(), Manual()
    fit(ours, "ddp_brimful", limit_train_batches=4)
    fit(theirs, "ddp_find_unused_parameters_true", limit_train_batches=4)
    assert same(values_of(ours.net), values_of(theirs.net))
    return values_of(ours.net)


def test_manual_optimization_steps_over_all_ranks(ranks):
    first, second = ranks(manual_job)
    assert same(first, second)


class KeepReport(lightning.MemoryReport):
    def on_train_end(self, trainer, pl_module):
        super().on_train_end(trainer, pl_module)
        self.report = trainer.strategy.sizer.report()


def sizer_job(rank, accumulate):
    under_torchrun(rank)
    memory = Memory(3, here=rank.index == 1)
    module, plain = Module(memory), Module()
    strategy = lightning.BrimfulStrategy(sizer=True)
    report = KeepReport()
    options = {"limit_train_batches": 4, "accumulate_grad_batches": accumulate}
    trainer = fit(module, strategy, [report], gradient_clip_val=0.5, **options)
    fit(plain, "ddp", gradient_clip_val=0.5, **options)
    assert same(values_of(module.net), values_of(plain.net))
    assert (memory.refusals > 0) == (rank.index == 1)
    assert (report.report.retries > 0) == (rank.index == 1)  # the other rank waited
    assert strategy.sizer is None  # nothing keeps the buckets
    assert trainer.callback_metrics["peak_bytes_epoch"] > 0
    return values_of(module.net)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_run_in_pieces_that_fit_and_train_the_same(ranks, accumulate):
    first, second = ranks(sizer_job, accumulate)
    assert same(first, second)


def finder_job(rank, mode, late, folder):
    under_torchrun(rank)
    module = Module(Memory(20, here=rank.index == 1, late=late), batch_size=2)
    finder = lightning.BatchSizeFinder(mode, steps_per_trial=1, init_val=16, margin=0.0)
    fit(module, "ddp_brimful", [finder], limit_train_batches=1, default_root_dir=folder)
    return finder.optimal_batch_size, module.batch_size, values_of(module.net)


@pytest.mark.parametrize(("mode", "late", "found"), [("power", True, 16), ("binsearch", False, 20)])
def test_the_batch_size_finder_works_on_two_ranks_of_which_one_has_less_memory(
    ranks, tmp_path, mode, late, found
):
    first, second = ranks(finder_job, mode, late, str(tmp_path))
    assert first[:2] == second[:2] == (found, found)
    assert same(first[2], second[2])


def refused_job(rank):
    under_torchrun(rank)
    with pytest.raises(ValueError, match="automatic_optimization: False"):
        fit(Manual(), lightning.BrimfulStrategy(sizer=True))
    # Memory for less than a row: both ranks end, with what was tried.
    module = Module(Memory(0, here=rank.index == 1))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(module, lightning.BrimfulStrategy(sizer={"max_retries": 2}))
    return type(caught.value).__name__


def test_what_cannot_be_done_is_said_on_both_ranks(ranks):
    assert ranks(refused_job) == ["RankOutOfMemory", "BatchTooLarge"]


def fabric_job(rank, folder):
    under_torchrun(rank)
    results = []
    for strategy in ("ddp", "ddp_brimful"):
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        model = net()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(dataset(), batch_size=8))
        for number, (x, y) in enumerate(loader):
            accumulates = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                fabric.backward(F.cross_entropy(model(x), y) / 2)
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        if strategy == "ddp_brimful":
            assert is_ours(model._forward_module)
            assert model._forward_module.reducer.counters.steps == len(loader) // 2
        path = f"{folder}/{strategy}"
        fabric.save(path, {"model": model, "optimizer": optimizer})
        assert list(torch.load(path)["model"]) == list(net().state_dict())
        again = fabric.setup(net())
        fabric.load(path, {"model": again}, strict=False)
        assert same(values_of(again.module), values_of(model.module))
        results.append(values_of(model.module))
    assert same(*results)
    return results[1]


def test_fabric_trains_accumulates_clips_saves_and_loads(ranks, tmp_path):
    first, second = ranks(fabric_job, str(tmp_path))
    assert same(first, second)
