"""What is a shortage, for all that goes on after one: an error of its type, or one that has lost it and says so."""

import pytest
import torch

import brimful
from brimful import _C, search

ROWS, FIT = 8, 2
NVML = (
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838, '
    "please report a bug to PyTorch."
)
SHORTAGES = [
    torch.OutOfMemoryError("planted"),
    MemoryError("planted"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError(NVML),
]
OTHERS = [
    ValueError("CUDA out of memory."),
    RuntimeError("shape mismatch"),
    RuntimeError("NCCL error: Cuda failure 2 'out of memory'"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/PeerToPeer.cpp":20'),
]


class Limited:
    """Room for `FIT` rows."""

    def __init__(self, error):
        self.error = error

    def __call__(self, rows):
        if rows > FIT:
            raise self.error


class Unwilling(torch.Tensor):
    """A class with an indexing of its own, which copies."""

    limited = None

    def __getitem__(self, index):
        found = super().__getitem__(index).clone()
        Unwilling.limited(len(found))
        return found


def net():
    return torch.nn.Linear(3, 1)


def steps(limited):
    def loss(model, x):
        limited(len(x))
        return model(x).square().mean()

    return brimful.BatchSizer(net()).step(torch.randn(ROWS, 3), loss).pieces


def steps_over_pairs(limited):
    def embed(model, x):
        limited(len(x))
        return model(x)

    sizer = brimful.BatchSizer(net())
    return sizer.pair_step(torch.randn(ROWS, 3), embed, lambda h: (h @ h.T).mean()).pieces


def finds_a_rule(limited):
    def loss(model, x):
        limited(len(x))
        return model(x).square().mean()

    sizer = brimful.BatchSizer(net(), loss_rule="find")
    return sizer.step(torch.randn(ROWS, 3), loss).pieces


def trims(limited):
    def loss(model, piece):
        limited(len(piece["input_ids"]))
        return model(piece["input_ids"].float()[:, :3]).square().mean()

    ids = torch.ones(ROWS, 6, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return brimful.BatchSizer(net(), by_length=True).step(batch, loss).pieces


def cuts_by_own_indexing(limited):
    Unwilling.limited = limited
    batch = torch.randn(ROWS, 3).as_subclass(Unwilling)
    sizer = brimful.BatchSizer(net())
    return sizer.step(batch, lambda model, x: model(x.as_subclass(torch.Tensor)).mean()).pieces


def maps(limited):
    _C._forget_map_sizes()
    pieces = []

    def predict(x):
        pieces.append(len(x))
        limited(len(x))
        return x

    brimful.map_batches(predict, torch.randn(ROWS, 3))
    return len(pieces)


def runs_a_pipeline(limited):
    def loss(output, _):
        limited(len(output))
        return output.square().mean()

    pipe = brimful.Pipeline([net()], devices=["cpu"], microbatches=1, loss_fn=loss)
    return pipe.step(torch.randn(ROWS, 3)).retries + 1


def finds_a_batch_size(limited):
    sizes = []

    @brimful.find_executable_batch_size(starting_batch_size=ROWS)
    def train(batch_size):
        sizes.append(batch_size)
        limited(batch_size)

    train()
    return len(sizes)


def ends_a_trial(limited):
    def train(config):
        limited(ROWS)

    return 1 + search.guard(train, metric="loss")({})["oom"]


WAYS = [
    steps,
    steps_over_pairs,
    finds_a_rule,
    trims,
    cuts_by_own_indexing,
    maps,
    runs_a_pipeline,
    finds_a_batch_size,
    ends_a_trial,
]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@ways
@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: repr(error)[:50])
def test_all_go_on_after_a_shortage(way, error):
    assert way(Limited(error)) > 1
    assert _C._is_out_of_memory(error)


@ways
@pytest.mark.parametrize("error", OTHERS, ids=lambda error: repr(error)[:50])
def test_none_goes_on_after_another_error(way, error):
    assert not _C._is_out_of_memory(error)
    if way is ends_a_trial and "NCCL" in str(error):
        return  # a trial is not repeated with that communicator, and has lost for want of memory
    with pytest.raises(Exception) as caught:
        way(Limited(error))
    assert error in (caught.value, caught.value.__cause__)


def test_what_another_rank_says_of_its_memory_is_its_own():
    assert _C._is_out_of_memory(brimful.RankOutOfMemory("rank 1: CUDA out of memory"))
    assert not _C._is_out_of_memory(brimful.RankFailed("rank 1 said: CUDA out of memory"))
    assert not _C._is_out_of_memory(torch.distributed.DistBackendError("CUDA out of memory"))
    assert not _C._is_out_of_memory(KeyboardInterrupt())


def test_an_error_without_a_text_is_no_shortage():
    class Silent(RuntimeError):
        def __str__(self):
            raise ValueError("no text")

    assert not _C._is_out_of_memory(Silent())
