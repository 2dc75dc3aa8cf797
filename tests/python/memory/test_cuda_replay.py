"""The model of torch's CUDA allocator beside the allocator itself: the same bytes behind each event."""

import random
import sys
from pathlib import Path

import pytest
import torch

from brimful import _C

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.cuda.recorded import Recorded
from benchmarks.cuda.replay_steps import SETTINGS
from benchmarks.sizer import models

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
MIB = 1 << 20
PLAIN = (
    "expandable_segments:False,roundup_power2_divisions:1,max_split_size_mb:1000000,"
    "max_non_split_rounding_mb:20"
)


@pytest.fixture
def settings():
    """settings(text): of the allocator, which is empty then; the plain ones after the test."""

    def begin(text):
        torch.cuda.empty_cache()
        torch._C._accelerator_setAllocatorSettings(PLAIN)
        torch._C._accelerator_setAllocatorSettings(text)

    yield begin
    begin(PLAIN)  # a threshold that is not named is 0 again


@pytest.mark.smoke
@pytest.mark.parametrize("name", models.CASES)
@pytest.mark.parametrize("text", SETTINGS.values(), ids=SETTINGS)
def test_steps_of_models_take_what_the_model_of_the_allocator_says(settings, text, name):
    settings(text)
    torch.manual_seed(0)
    case = models.CASES[name]
    model = case.make().cuda()
    for rows in (3, case.rows // 8, case.rows // 2):
        batch = case.batch(rows).cuda()
        step = Recorded(lambda batch=batch: models.loss(model, batch).backward())
        taken = [request for request in step.requests if request[0] == "alloc"]
        assert len(taken) > 10
        assert sum(bytes is not None for bytes in step.allocated) > len(taken)
        assert step.differences() == []


def test_a_block_that_another_stream_uses_is_free_when_it_is_done(settings):
    settings(PLAIN)
    side = torch.cuda.Stream()

    def run():
        held = torch.ones(3 * MIB, device="cuda")
        with torch.cuda.stream(side):
            torch.cuda._sleep(1000)
            held.add_(1)
            torch.empty(5 * MIB, device="cuda")
        held.record_stream(side)
        del held
        torch.empty(3 * MIB, device="cuda")
        torch.cuda.synchronize()
        torch.empty(3 * MIB, device="cuda")

    step = Recorded(run)
    assert [request[0] for request in step.requests].count("free_completed") == 4
    assert step.differences() == []


class Requests:
    """Random ones, of two streams, until memory runs out; and what the allocator has behind each."""

    def __init__(self, seed):
        draw = random.Random(seed)
        streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
        self.live, self.asked, self.after = {}, [], []
        for _ in range(2000):
            if self.live and draw.random() < 0.42:
                self.give_back(draw.choice(list(self.live)))
                continue
            bytes = int(2 ** draw.uniform(5, 26))
            if not self.take(bytes, draw.choice(streams)):
                break

    def take(self, bytes, stream):
        name = len(self.asked)
        self.asked.append(("alloc", name, bytes, stream.cuda_stream))
        try:
            self.live[name] = torch.cuda.caching_allocator_alloc(bytes, 0, stream)
        except torch.OutOfMemoryError:
            return False
        self.note()
        return True

    def give_back(self, name):
        torch.cuda.caching_allocator_delete(self.live.pop(name))
        for action in ("free_requested", "free_completed"):
            self.asked.append((action, name, 0, 0))
            self.note()

    def note(self):
        self.after.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))


@pytest.fixture
def room():
    """room(bytes, how): that much for the allocator: of the device, or by a fraction of it."""
    held = []

    def make(bytes, how):
        free, total = torch.cuda.mem_get_info()
        if how == "device":
            held.append(torch.cuda.caching_allocator_alloc(free - bytes))
        else:
            torch.cuda.set_per_process_memory_fraction(
                (torch.cuda.memory_reserved() + bytes) / total
            )

    yield make
    torch.cuda.set_per_process_memory_fraction(1.0)
    for block in held:
        torch.cuda.caching_allocator_delete(block)


@pytest.mark.parametrize("seed", [1, 112, 116, 152])
@pytest.mark.parametrize(
    ("text", "how"),
    [
        *((text, how) for text in SETTINGS.values() for how in ("device", "fraction")),
        ("garbage_collection_threshold:0.5", "fraction"),  # without a fraction torch collects none
    ],
)
def test_memory_runs_out_where_the_model_says(settings, room, text, how, seed):
    torch.cuda.empty_cache()
    room(400 * MIB, how)
    settings(text)
    pool = _C._cuda_pool("cuda")
    real = Requests(seed)
    after, ran_out, releases = pool.replay(real.asked)
    for block in real.live.values():
        torch.cuda.caching_allocator_delete(block)
    wrong = [
        i for i, (told, is_it) in enumerate(zip(after, real.after, strict=False)) if told != is_it
    ]
    assert wrong[:1] == []
    assert len(after) == len(real.after) > 50
    assert (ran_out, releases > 0) == (len(real.asked) - 1, True)
