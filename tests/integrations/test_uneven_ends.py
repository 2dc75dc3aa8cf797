"""Ranks whose data ends at different steps, in the loops of Hugging Face and Lightning: all train until all end."""

import pytest
import torch
import torch.nn.functional as F
from models import classes, values_of
from trainers import Memory, net, same, under_torchrun

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
adapter = pytest.importorskip("brimful.integrations.transformers")
test_with_transformers = pytest.importorskip("test_with_transformers")


test_with_lightning = pytest.importorskip("test_with_lightning")


class Own(transformers.Trainer):
    """With a loader of this rank, which nothing makes even."""

    def __init__(self, rows, **options):
        super().__init__(train_dataset=rows, **options)

    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            collate_fn=transformers.default_data_collator,
        )


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def trainer(folder, rows, kind=Own, model=None, **options):
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        optim="sgd",
        learning_rate=0.1,
        **options,
    )
    return kind(rows, model=model or test_with_transformers.model(), args=arguments)


def uneven_job(rank, folder, streamed, accumulation, rows):
    under_torchrun(rank)
    every = test_with_transformers.sentences(sum(rows))
    mine = every[sum(rows[: rank.index]) : sum(rows[: rank.index + 1])]
    steps = {"max_steps": 4 if accumulation == 1 else 2} if streamed else {"num_train_epochs": 1}
    model = trainer(
        folder,
        Stream(mine) if streamed else mine,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        **steps,
    )
    model.add_callback(adapter.BrimfulCallback(model))
    model.train()
    logs = [entry["loss"] for entry in model.state.log_history if "loss" in entry]
    return values_of(model.model), model.state.global_step, logs


def expected(folder, rows, accumulation):
    """One process that has all rows of a step in its batch: the loss is over the tokens of all."""
    every = test_with_transformers.sentences(sum(rows))
    first, second = every[: rows[0]], every[rows[0] :]
    model = test_with_transformers.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = -(-max(rows) // (4 * accumulation))
    for step in range(steps):
        window = slice(step * 4 * accumulation, (step + 1) * 4 * accumulation)
        batch = transformers.default_data_collator(first[window] + second[window])
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (steps - step) / steps  # the trainer's schedule
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


@pytest.mark.parametrize(
    ("streamed", "accumulation", "rows"),
    [(False, 1, (8, 16)), (False, 2, (12, 16)), (True, 1, (16, 8))],
)
def test_a_rank_whose_loader_is_shorter_takes_part_until_all_end(
    ranks, tmp_path, streamed, accumulation, rows
):
    first, second = ranks(uneven_job, str(tmp_path), streamed, accumulation, rows)
    assert same(first[0], second[0])
    assert first[1] == second[1] == 4 // accumulation
    assert same(first[0], expected(str(tmp_path), rows, accumulation))


class OfThisRank(test_with_lightning.Module):
    def __init__(self, rank, rows, streamed, memory=None):
        super().__init__(memory)
        x, y = classes(sum(rows))
        mine = slice(sum(rows[: rank.index]), sum(rows[: rank.index + 1]))
        self.data = list(zip(x[mine], y[mine], strict=True))
        self.streamed, self.ends = streamed, 0

    def train_dataloader(self):
        data = Stream(self.data) if self.streamed else self.data
        return torch.utils.data.DataLoader(data, batch_size=4)

    def on_train_batch_end(self, *_):
        self.ends += 1


def lightning_job(rank, rows, streamed):
    under_torchrun(rank)
    memory = Memory(3, here=rank.index == 1)
    module = OfThisRank(rank, rows, streamed, memory)
    strategy = test_with_lightning.lightning.BrimfulStrategy(sizer=True)
    test_with_lightning.fit(module, strategy, max_epochs=2, use_distributed_sampler=False)
    return values_of(module.net), module.ends, memory.refusals


@pytest.mark.parametrize(("streamed", "rows"), [(False, (8, 14)), (True, (14, 6))])
def test_a_rank_whose_data_is_shorter_takes_part_in_lightnings_loop(ranks, streamed, rows):
    first, second = ranks(lightning_job, rows, streamed)
    assert same(first[0], second[0])
    steps = -(-max(rows) // 4)
    assert first[1] == second[1] == 2 * steps
    assert first[2] == 0 < second[2]
    module, (x, y) = net(), classes(sum(rows))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in 2 * list(range(steps)):
        here = slice(4 * step, 4 * step + 4)
        own = [torch.cat([of[: rows[0]][here], of[rows[0] :][here]]) for of in (x, y)]
        F.cross_entropy(module(own[0]), own[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(first[0], values_of(module))
