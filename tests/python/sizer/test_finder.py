"""find_executable_batch_size: as accelerate's, and the ranks go down together."""

import gc
import inspect
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from models import classes, cross_entropy, dropout_net, wrap
from rank_processes import raised

import brimful
from brimful import _C, memory

NEVER = 1 << 40
# What accelerate's own tests expect of its decorator.
BACK_OFF = [
    128,
    115,
    103,
    92,
    82,
    73,
    65,
    58,
    52,
    46,
    41,
    36,
    32,
    28,
    25,
    22,
    19,
    17,
    15,
    13,
    11,
    9,
    8,
]


@pytest.fixture(autouse=True)
def no_limit():
    memory.set_limit("cpu", None)
    yield
    memory.set_limit("cpu", None)


@pytest.mark.smoke
def test_the_size_goes_down_as_accelerates_does():
    sizes = []

    @brimful.find_executable_batch_size(starting_batch_size=128)
    def train(batch_size, greeting, *, name):
        """Trains."""
        sizes.append(batch_size)
        if batch_size > 8:
            raise RuntimeError("CUDA out of memory.")
        return batch_size, greeting, name

    assert train("hello", name="world") == (8, "hello", "world")
    assert sizes == BACK_OFF
    assert train("again", name="x") == (8, "again", "x")  # begins where it ended
    assert (train.__name__, train.__doc__) == ("train", "Trains.")
    assert list(inspect.signature(train).parameters) == ["args", "kwargs"]


def test_it_decorates_without_arguments_and_is_called_with_the_function():
    @brimful.find_executable_batch_size
    def plain(batch_size):
        return batch_size

    assert plain() == 128
    assert brimful.find_executable_batch_size(lambda n: n, 5)() == 5
    assert [
        (p.name, p.default)
        for p in inspect.signature(brimful.find_executable_batch_size).parameters.values()
    ] == [("function", None), ("starting_batch_size", 128), ("reduce_batch_size_fn", None)]


@pytest.mark.parametrize("as_decorator", [True, False])
def test_a_back_off_of_ones_own(as_decorator):
    sizes, current = [], 256

    def halve():
        nonlocal current
        current //= 2
        return current

    def train(batch_size):
        sizes.append(batch_size)
        if batch_size > 16:
            raise torch.OutOfMemoryError("planted")

    options = {"starting_batch_size": 256, "reduce_batch_size_fn": halve}
    if as_decorator:
        brimful.find_executable_batch_size(**options)(train)()
    else:
        brimful.find_executable_batch_size(train, **options)()
    assert sizes == [256, 128, 64, 32, 16]


def test_a_real_shortage_is_survived_and_leaves_nothing():
    gc.collect()
    before = memory.stats("cpu").used_bytes
    memory.set_limit("cpu", before + 1000)
    found = brimful.find_executable_batch_size(
        lambda batch_size: len(torch.empty(batch_size * 10, dtype=torch.uint8)) // 10
    )()
    memory.set_limit("cpu", None)
    assert found == 92
    assert memory.stats("cpu").used_bytes == before


def test_the_frames_of_a_try_are_gone_when_the_next_begins():
    class Held:
        pass

    references, alive = [], []

    @brimful.find_executable_batch_size(starting_batch_size=10)
    def train(batch_size):
        gc.disable()
        alive.append(sum(reference() is not None for reference in references))
        local, cycle = Held(), Held()
        cycle.itself = cycle
        references.extend([weakref.ref(local), weakref.ref(cycle)])
        if batch_size > 7:
            raise torch.OutOfMemoryError("planted")
        assert sys.exc_info() == (None, None, None)

    try:
        train()
    finally:
        gc.enable()
    assert alive == [0, 0, 0, 0]


SHORTAGES = [
    torch.OutOfMemoryError("planted"),
    MemoryError(),
    RuntimeError("XPU out of memory. Tried to allocate"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    brimful.RankOutOfMemory("rank 1"),
]
OTHERS = [
    ValueError("CUDA out of memory."),
    RuntimeError("NCCL error: Cuda failure 2 'out of memory'. out of memory."),
    RuntimeError("shape mismatch"),
    brimful.RankFailed("rank 1 said: CUDA out of memory."),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=repr)
def test_what_is_a_shortage(error):
    @brimful.find_executable_batch_size(starting_batch_size=10)
    def train(batch_size):
        if batch_size == 10:
            raise error
        return batch_size

    assert train() == 9


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_any_other_error_passes(error):
    sizes = []

    @brimful.find_executable_batch_size(starting_batch_size=10)
    def train(batch_size):
        sizes.append(batch_size)
        raise error

    with pytest.raises(type(error)) as caught:
        train()
    assert caught.value is error and sizes == [10]


def test_zero_is_reached():
    words = "No executable batch size found, reached zero."
    sizes = []

    @brimful.find_executable_batch_size(starting_batch_size=4)
    def train(batch_size):
        sizes.append(batch_size)
        raise torch.OutOfMemoryError("planted")

    for _ in range(2):
        error = raised(train)
        assert type(error) is RuntimeError and str(error) == words
    assert sizes == [4, 3, 2, 1]
    error = raised(brimful.find_executable_batch_size(lambda n: n, 0))
    assert type(error) is RuntimeError and str(error) == words


def test_a_batch_size_from_the_caller_is_refused_as_accelerate_does():
    @brimful.find_executable_batch_size
    def train(batch_size, first, second):
        return batch_size, first, second

    error = raised(train, 128, "hello", "world")
    assert type(error) is TypeError
    assert str(error) == (
        "Batch size was passed into `train` as the first argument when called. "
        "Remove this as the decorator already does so: `train(first=hello, second=world)`"
    )

    @brimful.find_executable_batch_size
    def loose(batch_size, *args):
        return batch_size, args

    assert loose(1, 2, 3) == (128, (1, 2, 3))


def together_job(rank, failing, start):
    sizes = []

    @brimful.find_executable_batch_size(starting_batch_size=start)
    def train(batch_size):
        sizes.append(batch_size)
        if rank.index in failing and batch_size > 7:
            torch.empty(batch_size, 1 << 30)
        return batch_size, torch.ones(batch_size)

    memory.set_limit("cpu", memory.stats("cpu").used_bytes + (1 << 20))
    found, _ = train()
    memory.set_limit("cpu", None)
    again, _ = train()
    dist.barrier()
    keys = [key for key in ("1", "2", "3") if _store().check([f"brimful/attempt/{key}/0"])]
    return sizes, found, again, keys


def _store():
    return dist.distributed_c10d._get_default_store()


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_all_ranks_go_down_together(ranks, failing):
    for sizes, found, again, keys in ranks(together_job, failing, 10):
        assert sizes == [10, 9, 8, 7, 7]
        assert found == again == 7
        assert len(keys) <= 1  # what they said in older meetings is gone


def error_job(rank, failing, short):
    @brimful.find_executable_batch_size(starting_batch_size=10)
    def train(batch_size):
        if rank.index == failing:
            raise KeyError("planted")
        if rank.index == short:
            raise torch.OutOfMemoryError("short")
        return batch_size

    first = raised(train)

    @brimful.find_executable_batch_size(starting_batch_size=10)
    def next_one(batch_size):
        if batch_size == 10 and rank.index == short:
            raise torch.OutOfMemoryError("short")
        return batch_size

    return first, next_one()


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("others", ["fit", "run out"])
def test_another_error_reaches_the_other_ranks(ranks, failing, others):
    short = None if others == "fit" else (failing + 1) % 3
    results = ranks(error_job, failing, short, size=3)
    for index, (error, found) in enumerate(results):
        if index == failing:
            assert type(error) is KeyError
        else:
            assert type(error) is brimful.RankFailed and error.rank == failing, error
            assert str(error) == (
                f"rank {failing} could not find a batch size that fits: KeyError: 'planted'"
            )
        assert error.seconds < 1.9  # nobody waits, neither for a timeout nor for who does not read
        assert found == (10 if short is None else 9)


def zero_job(rank):
    """One rank has another back-off, and reaches zero first."""
    steps = iter([6, 0] if rank.index == 1 else [9, 8, 7])

    @brimful.find_executable_batch_size(
        starting_batch_size=10, reduce_batch_size_fn=lambda: next(steps)
    )
    def train(batch_size):
        raise torch.OutOfMemoryError("planted")

    return raised(train)


def test_a_rank_that_reaches_zero_alone_is_informed(ranks):
    first, second = ranks(zero_job)
    assert type(second) is RuntimeError
    assert type(first) is brimful.RankFailed and first.rank == 1
    assert "RuntimeError: No executable batch size found, reached zero." in str(first)


def missing_job(rank):
    if rank.index == 1:
        return None
    return raised(brimful.find_executable_batch_size(lambda n: n))


def test_a_rank_that_does_not_come_is_named(ranks):
    error, _ = ranks(missing_job, timeout_s=2)
    assert type(error) is brimful.RankFailed and error.rank == 1
    assert "not all ranks came to find a batch size that fits (missing: rank 1;" in str(error)


def trained(batch_size, index, fault_at=NEVER, module=None):
    model = wrap(dropout_net()) if module is None else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        batch = classes(batch_size, seed=10 * step + index)
        with _C._FaultAt(fault_at if step == 1 else NEVER):
            loss = cross_entropy(model, batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def ddp_job(rank, failing, inside):
    """The fault is at every allocation of the second step in turn; the model is made in the function or before it."""
    more, index = True, 0
    while more:
        assert index < 300
        outer = None if inside else wrap(dropout_net())
        sizes = []

        @brimful.find_executable_batch_size(starting_batch_size=10)
        def train(batch_size, outer=outer, sizes=sizes, index=index):
            sizes.append(batch_size)
            torch.manual_seed(0)
            faults = rank.index in failing and batch_size == 10
            return trained(batch_size, rank.index, index if faults else NEVER, outer)

        values = train()
        hit = torch.tensor([float(len(sizes) > 1)])
        dist.all_reduce(hit, dist.ReduceOp.MAX)
        more = bool(hit.item())
        assert sizes == ([10, 9] if more else [10]), sizes
        both = [torch.empty(0)] * 2
        dist.all_gather_object(both, values)
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True)), index
        index += 1
    return index


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_a_wrapped_model_inside_informs_the_others_by_itself(ranks, failing, inside):
    first, second = ranks(ddp_job, failing, inside, watchdog_s=60)
    assert first == second > 30
