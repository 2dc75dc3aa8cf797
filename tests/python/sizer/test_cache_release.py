"""Fragmentation is kept apart from capacity: the same split once more with the cache released, before a finer one."""

import gc
import weakref

import pytest
import torch
from models import classes, cross_entropy, gradients_of, same_bits, wrap

import brimful

FRAGMENTED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which "
    "512.00 MiB is free. Of the allocated memory 60.00 GiB is allocated by PyTorch, and 3.00 GiB is "
    "reserved by PyTorch but unallocated."
)
FULL = FRAGMENTED.replace("3.00 GiB is reserved", "8.00 MiB is reserved")
ROWS = 8


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


class Planted:
    """A loss function that runs out of memory with given words, one call each, and notes the rows of its pieces."""

    def __init__(self, *words):
        self.words = list(words)
        self.rows = []
        self.frame_tensors = []

    def __call__(self, model, piece):
        gc.collect()
        assert all(tensor() is None for tensor in self.frame_tensors)  # of the attempt before
        loss = cross_entropy(model, piece)
        self.rows.append(len(piece[1]))
        self.frame_tensors.append(weakref.ref(loss))
        if self.words:
            word = self.words.pop(0)
            if word:
                raise torch.OutOfMemoryError(word)
        return loss


def tries(outcome):
    return [(attempt.pieces, attempt.cache_released) for attempt in outcome.attempts]


def step(sizer, model, loss, rows=ROWS, **options):
    outcome = sizer.step(classes(rows), loss, **options)
    model.zero_grad()
    return outcome


def test_fragmentation_is_repeated_in_the_same_split_capacity_in_a_finer_one():
    model = net()
    outcome = step(brimful.BatchSizer(model), model, Planted(FRAGMENTED))
    assert tries(outcome) == [(1, True), (1, False)] and outcome.retries == 1
    assert tries(step(brimful.BatchSizer(model), model, Planted(FULL))) == [(1, False), (2, False)]


def test_a_release_that_does_not_help_is_followed_by_a_finer_split():
    model = net()
    outcome = step(brimful.BatchSizer(model), model, Planted(FRAGMENTED, FRAGMENTED))
    assert tries(outcome) == [(1, True), (1, True), (2, False)]


def test_it_is_asked_for_once_in_sixteen_steps():
    model = net()
    sizer = brimful.BatchSizer(model)
    assert tries(step(sizer, model, Planted(FRAGMENTED))) == [(1, True), (1, False)]
    assert tries(step(sizer, model, Planted(FRAGMENTED))) == [(1, True), (2, False)]
    for _ in range(15):
        step(sizer, model, Planted())
    assert tries(step(sizer, model, Planted(FRAGMENTED))) == [(1, True), (1, False)]
    assert sizer.report().cache_releases == 3


def test_where_nothing_is_left_to_split_a_release_may_still_do():
    model = net()

    def only_split(model):
        return brimful.BatchSizer(model, ladder="split")

    outcome = step(brimful.BatchSizer(model), model, Planted(FRAGMENTED), rows=1)
    assert tries(outcome) == [(1, True), (1, False)]
    with pytest.raises(brimful.BatchTooLarge, match="expandable_segments:True"):
        step(only_split(model), model, Planted(FRAGMENTED, FRAGMENTED), rows=1)
    with pytest.raises(brimful.BatchTooLarge) as full:
        step(only_split(model), model, Planted(FULL), rows=1)
    assert not any("expandable_segments" in advice for advice in full.value.advice)
    with pytest.raises(brimful.BatchTooLarge):
        step(brimful.BatchSizer(model, max_retries=0), model, Planted(FRAGMENTED), rows=1)


def test_an_error_of_a_library_is_no_fragmentation_on_a_cpu():
    model = net()
    loss = Planted("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert tries(step(brimful.BatchSizer(model), model, loss)) == [(1, False), (2, False)]


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "CUDA error: device-side assert triggered",
        "CUDA error: an illegal memory access was encountered (CUDA out of memory)",
        "NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'",
        "Storage size calculation overflowed with sizes=[9, 9]",
    ],
)
def test_what_is_no_shortage_comes_out_as_it_went_in(words):
    model = net()
    calls = []
    error = RuntimeError(words)

    def loss(model, piece):
        calls.append(len(piece[1]))
        raise error

    with pytest.raises(RuntimeError) as caught:
        brimful.BatchSizer(model).step(classes(ROWS), loss)
    assert caught.value is error and calls == [ROWS]
    assert all(p.grad is None for p in model.parameters())


def test_a_communicator_that_is_lost_is_not_retried():
    model = net()
    calls = []

    def loss(model, piece):
        calls.append(len(piece[1]))
        raise torch.distributed.DistBackendError("CUDA out of memory")

    with pytest.raises(torch.distributed.DistBackendError):
        brimful.BatchSizer(model).step(classes(ROWS), loss)
    assert calls == [ROWS]


def ranks_job(rank, at):
    model = wrap(net())
    sizer = brimful.BatchSizer(model)
    batch = classes(ROWS, seed=rank.index)
    sizer.step(batch, cross_entropy)
    expected = gradients_of(model)
    model.zero_grad()
    left = [rank.index == 1]

    def refuse(*_):
        if left[0]:
            left[0] = False
            raise torch.OutOfMemoryError(FRAGMENTED)

    if at == "forward":
        model.module[2].register_forward_pre_hook(refuse)
    else:
        model.module[at].weight.register_hook(refuse)
    outcome = sizer.step(batch, cross_entropy)
    assert same_bits(gradients_of(model), expected)
    return outcome.retries, tries(outcome)


@pytest.mark.parametrize("at", ["forward", 2, 0])
def test_the_other_ranks_follow(ranks, at):
    (others_retries, others), (retries, own) = ranks(ranks_job, at)
    assert retries == 1 and own == [(1, True), (1, False)]
    assert others == [(1, False)] * (1 + others_retries)


@pytest.mark.gpu
def test_fragments_of_a_gpu_are_released_and_the_step_fits():
    device = torch.device("cuda")
    model = torch.nn.Linear(8, 8, device=device)
    sizer = brimful.BatchSizer(model)
    batch = torch.randn(4, 8, device=device)
    sizer.step(batch, lambda model, piece: model(piece).square().mean())  # libraries have theirs
    model.zero_grad()
    brimful.memory.release_cached(device)
    mebibyte = 1 << 20
    reserved = brimful.memory.stats(device).reserved_bytes
    brimful.memory.set_limit(device, reserved + 200 * mebibyte)
    first = []

    def loss(model, piece):
        if not first:
            first.append(True)
            # Four segments of 40 MiB, each with 16 left: 64 MiB are cached and 40 left, but no 48 in one piece.
            held = [torch.empty(40 * mebibyte, dtype=torch.uint8, device=device) for _ in range(4)]
            held.clear()
            held += [torch.empty(24 * mebibyte, dtype=torch.uint8, device=device) for _ in range(4)]
        work = torch.empty(48 * mebibyte, dtype=torch.uint8, device=device)
        del work
        return model(piece).square().mean()

    try:
        outcome = sizer.step(batch, loss)
    finally:
        brimful.memory.set_limit(device, None)
    assert tries(outcome) == [(1, True), (1, False)]


@pytest.mark.gpu
def test_a_library_s_handle_that_finds_no_memory_gets_torch_s_cache():
    device = torch.device("cuda")
    model = torch.nn.Linear(8, 8, device=device)
    sizer = brimful.BatchSizer(model)
    batch = torch.randn(4, 8, device=device)
    cached = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    del cached
    reserved = brimful.memory.stats(device).reserved_bytes
    words = iter(["CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"])

    def loss(model, piece):
        for word in words:
            raise RuntimeError(word)
        assert brimful.memory.stats(device).reserved_bytes < reserved
        return model(piece).square().mean()

    assert tries(sizer.step(batch, loss)) == [(1, True), (1, False)]


def test_a_pipeline_repeats_the_same_microbatches_too():
    model = net()
    x, y = classes(ROWS)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    expected = gradients_of(model)
    model.zero_grad()
    words = [FRAGMENTED, FRAGMENTED]

    def loss_fn(output, target):
        if words:
            raise torch.OutOfMemoryError(words.pop(0))
        return torch.nn.functional.cross_entropy(output, target)

    pipe = brimful.Pipeline([model], microbatches=2, loss_fn=loss_fn)
    words.pop()
    assert tries(pipe.step(x, y)) == [(2, True), (2, False)]
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, expected[name])
    words += [FRAGMENTED]  # too soon
    assert tries(pipe.step(x, y)) == [(2, True), (4, False)]
    words += [FULL]
    assert tries(pipe.step(x, y)) == [(4, False), (8, False)]
    report = pipe.report()
    assert (report.cache_releases, report.retries, report.ooms) == (2, 3, 3)


def test_inference_repeats_the_same_rows_too():
    words, sizes = [FRAGMENTED], []

    def forward(piece):
        sizes.append(len(piece))
        if words:
            raise torch.OutOfMemoryError(words.pop(0))
        return piece * 2

    x = torch.arange(8.0).reshape(8, 1)
    assert torch.equal(brimful.map_batches(forward, x), x * 2)
    assert sizes == [8, 8]
