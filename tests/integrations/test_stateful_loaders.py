"""Loaders that are resumed, torchdata's and accelerate's, under sizer.batches: as they are without it."""

import pytest
import torch
from trainers import under_torchrun

import brimful

stateful = pytest.importorskip("torchdata.stateful_dataloader")
accelerate = pytest.importorskip("accelerate")
utils = pytest.importorskip("accelerate.utils")

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def rows(count=16):
    return [torch.tensor([float(number)]) for number in range(count)]


def model():
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    return net, optimizer


def mean(model, x):
    return model(x).mean()


class Counts(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(rows())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [rows, Counts])
@pytest.mark.parametrize("after", [False, True])
def test_a_job_that_is_resumed_begins_with_the_batch_after_the_last_step(make, workers, after):
    net, optimizer = model()
    sizer = brimful.BatchSizer(net, optimizer)
    options = {"batch_size": 2, "num_workers": workers}
    if workers:
        options["multiprocessing_context"] = "fork"
    loader = stateful.StatefulDataLoader(make(), **options)
    for number, batch in enumerate(sizer.batches(loader), 1):
        sizer.step(batch, mean)
        net.zero_grad()
        if number == 3:
            state = loader.state_dict()
            break
    if after:
        state = loader.state_dict()
    loader = stateful.StatefulDataLoader(make(), **options)
    loader.load_state_dict(state)
    found = [batch.flatten().tolist() for batch in loader]
    skipped = 2 if make is Counts and workers else 1  # each worker has all rows of a stream
    assert found[0] == ([6.0, 7.0] if skipped == 1 else found[0])
    plain = stateful.StatefulDataLoader(make(), **options)
    for number, _ in enumerate(plain, 1):
        if number == 3:
            other = plain.state_dict()
            break
    plain = stateful.StatefulDataLoader(make(), **options)
    plain.load_state_dict(other)
    assert found == [batch.flatten().tolist() for batch in plain]


def prepared(count=16, accumulation=1, **options):
    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulation,
        dataloader_config=utils.DataLoaderConfiguration(**options),
    )
    net, optimizer = model()
    loader = torch.utils.data.DataLoader(rows(count), batch_size=2)
    return accelerator, *accelerator.prepare(net, optimizer, loader)


def resumed_with(folder, stop, use_brimful):
    accelerator, net, optimizer, loader = prepared(use_stateful_dataloader=True)
    sizer = brimful.BatchSizer(net, optimizer)
    source = sizer.batches(loader) if use_brimful else loader
    for number, batch in enumerate(source, 1):
        if use_brimful:
            sizer.step(batch, mean)
        optimizer.zero_grad()
        if number == stop:
            accelerator.save_state(folder)
            break
    accelerator, net, optimizer, loader = prepared(use_stateful_dataloader=True)
    accelerator.load_state(folder)
    return [batch.flatten().tolist() for batch in loader]


def accelerate_job(rank, folder, stop):
    under_torchrun(rank)
    here = f"{folder}/{rank.index}"
    plain, ours = (resumed_with(here, stop, use) for use in (False, True))
    assert ours == plain
    return ours


@pytest.mark.parametrize("stop", [3, 7, 8])
def test_accelerate_saves_and_resumes_after_the_last_step(ranks, tmp_path, stop):
    ((first, *_),) = ranks(accelerate_job, str(tmp_path), stop, size=1)
    assert stop == 8 or first == [2.0 * stop, 2.0 * stop + 1]


def ends(source, accelerator, net, loader, step):
    """What accelerate says in each body, by which it accumulates and drops rows that are there twice."""
    found = []
    for batch in source:
        step(batch)
        with accelerator.accumulate(net):
            state = accelerator.gradient_state
            found.append((accelerator.sync_gradients, state.end_of_dataloader, state.remainder))
    return found, state.in_dataloader, loader.iteration


def accumulation_job(rank, count):
    under_torchrun(rank)
    runs = []
    for use_brimful in (False, True):
        accelerator, net, optimizer, loader = prepared(count, accumulation=2)
        sizer = brimful.BatchSizer(net, optimizer)
        epochs = []
        for _ in range(2):
            if use_brimful:

                def step(batch, sizer=sizer, net=net):
                    sizer.step(batch, mean)
                    net.zero_grad()

                epochs.append(ends(sizer.batches(loader), accelerator, net, loader, step))
            else:
                epochs.append(ends(loader, accelerator, net, loader, lambda _: None))
        runs.append(epochs)
    assert runs[0] == runs[1]
    return runs[1][0]


@pytest.mark.parametrize("count", [10, 13])
def test_accelerate_is_at_the_end_in_the_last_body_and_in_no_other(ranks, count):
    ((found, after, _),) = ranks(accumulation_job, count, size=1)
    assert [end for _, end, _ in found] == [False] * (len(found) - 1) + [True]
    assert found[-1][0] and not after
