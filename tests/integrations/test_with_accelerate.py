"""Accelerate's prepare, no_sync, accumulate and checkpoints with brimful's class, on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import values_of
from trainers import Memory, dataset, is_ours, net, same, under_torchrun

import brimful

accelerate = pytest.importorskip("accelerate")
adapter = pytest.importorskip("brimful.integrations.accelerate")
ROOT = Path(__file__).resolve().parents[2]


def train(attached, accelerator, **options):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(dataset(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if attached:
        model = adapter.attach(accelerator, model, **options)
        assert is_ours(model)
    synced = []
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            synced.append(accelerator.sync_gradients)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert synced == [False, True, False, True]
    return model, values_of(model)


def trained_job(rank, folder):
    under_torchrun(rank)
    kwargs = accelerate.DistributedDataParallelKwargs(
        broadcast_buffers=False, comm_hook=accelerate.DDPCommunicationHookType.BF16
    )
    results = []
    for attached in (False, True):
        accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[kwargs]
        )
        model, values = train(attached, accelerator)
        results.append(values)
    assert same(*results)
    assert not model.forward_sync_buffers  # what DistributedDataParallelKwargs said
    assert model.reducer.counters.steps == 2  # of four backwards

    # unwrap_model, and a checkpoint that a plain model can read
    assert accelerator.unwrap_model(model) is model.module
    assert list(accelerator.get_state_dict(model)) == list(net().state_dict())
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    with torch.no_grad():
        next(model.parameters()).zero_()
    accelerator.load_state(folder)
    assert same(values_of(model), values)

    # no_sync by hand
    x = torch.full((4, 6), float(rank.index))
    model.zero_grad()
    with accelerator.no_sync(model):
        accelerator.backward(model(x).sum())
    own = [p.grad.clone() for p in model.parameters()]
    accelerator.backward(model(x).sum())
    assert model.reducer.counters.steps == 3
    return values, own[0], next(model.parameters()).grad.clone()


def test_no_sync_accumulate_hooks_and_checkpoints_work_as_with_torchs_class(ranks, tmp_path):
    (values, own, mean), (others, theirs, same_mean) = ranks(trained_job, str(tmp_path))
    assert same(values, others)
    assert not torch.equal(own, theirs)
    assert torch.equal(mean, same_mean)
    torch.testing.assert_close(mean, own + theirs, rtol=0.01, atol=0.0)  # it travels as bfloat16


def wrong_job(rank):
    under_torchrun(rank)
    accelerator = accelerate.Accelerator(cpu=True)
    ours = adapter.attach(accelerator, accelerator.prepare(net()), plan="registration")
    for model in (net(), ours):
        with pytest.raises(TypeError, match="only torch's DistributedDataParallel is replaced"):
            adapter.attach(accelerator, model)


def test_a_model_that_cannot_be_attached_is_a_typed_error(ranks):
    ranks(wrong_job)


def alone_job(rank):
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(net())
    return adapter.attach(accelerator, model) is model


def test_a_single_process_has_nothing_to_replace(ranks):
    assert ranks(alone_job, size=1) == [True]


def finder_job(rank):
    """accelerate's decorator is replaced by ours within a prepared loop, and the ranks agree."""
    under_torchrun(rank)
    sizes, memory = [], Memory(12, here=rank.index == 1)

    @brimful.find_executable_batch_size(starting_batch_size=16)
    def loop(batch_size):
        sizes.append(batch_size)
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.free_memory()
        module = net()
        module.register_forward_hook(lambda _, inputs, __: memory.check(inputs[0]))
        model = adapter.attach(accelerator, accelerator.prepare(module))
        accelerator.backward(model(torch.ones(batch_size, 6)).sum())
        return batch_size

    return loop(), sizes


def test_the_decorator_finds_one_size_for_both_ranks(ranks):
    assert ranks(finder_job) == [(12, [16, 14, 12])] * 2


def test_a_model_of_fsdp2_is_given_to_a_sizer_as_it_is():
    """On two simulated devices: on CPUs Accelerate shards nothing."""
    libraries = Path(brimful._C.__file__).with_name("cuda_sim")
    if not (libraries / "libnccl.so.2").exists():
        pytest.skip("the simulated device is not built")
    simulated = [ROOT / "csrc" / "cuda_sim" / "run.py", "--libraries", libraries, "--"]
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ROOT / "tests" / "integrations" / "programs" / "accelerate_fsdp2.py"
    command = [sys.executable, *simulated, sys.executable, *two, program]
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 made 2 pieces" in done.stdout
    assert "rank 1 made 2 pieces" in done.stdout
