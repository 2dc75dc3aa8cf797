"""An exception between two steps of one rank: in the loader, in the loop's body, swallowed or not."""

import pytest
import torch
from models import classes, cross_entropy, dropout_net, same_bits, values_of, wrap
from rank_processes import raised, run_script

import brimful

SOON_S = 2.0


def caught_job(rank, size):
    """Rank 1 leaves its loop by an error that its caller catches, and begins another loop; so do the others."""
    model = wrap(dropout_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizer = brimful.BatchSizer(model, optimizer)

    def epoch(faulty):
        steps = 0
        for batch in sizer.batches([classes(8, seed=s + rank.index) for s in range(4)]):
            sizer.step(batch, cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if faulty and steps == 2:
                raise OSError("planted between two steps")
        return steps

    first = raised(epoch, rank.index == 1)
    model.zero_grad()
    second = raised(epoch, False)
    return first, second, values_of(model)


@pytest.mark.parametrize("size", [2, 4])
def test_a_loop_that_one_rank_left_raises_on_the_others_and_the_next_loop_works(ranks, size):
    results = ranks(caught_job, size, size=size, timeout_s=5)
    for rank, (first, second, values) in enumerate(results):
        if rank == 1:
            assert type(first) is OSError
        else:
            assert type(first) is brimful.RankFailed and first.rank == 1, first
            assert "left its loop over data and began another one" in str(first)
            assert first.seconds < SOON_S
        assert second is None, second
        assert same_bits(values, results[0][2])


def left_by_all_job(rank):
    model = wrap(dropout_net())
    sizer = brimful.BatchSizer(model)
    for _ in range(3):
        for number, batch in enumerate(sizer.batches([classes(8, seed=s) for s in range(4)])):
            sizer.step(batch, cross_entropy)
            model.zero_grad()
            if number == 1:
                break
    return sizer.state_dict()["steps"]


def test_a_loop_that_all_ranks_left_together_is_no_failure(ranks):
    assert ranks(left_by_all_job) == [6, 6]


SCRIPT = """
import sys
from models import classes, cross_entropy, dropout_net, wrap
from rank_processes import join_group
import torch
import brimful

rank, port, way, place = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
join_group(rank, 2, port, 10)
model = wrap(dropout_net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sizer = brimful.BatchSizer(model, optimizer) if way == "sizer" else None


def data():
    for step in range(4):
        if rank == 1 and step == 2 and place == "loader":
            raise OSError("planted in the loader")
        yield classes(8, seed=step)


def fail_in_optimizer():
    if rank == 1 and place == "optimizer":
        optimizer.param_groups[0]["lr"] = "planted in the optimizer"
    if rank == 1 and place == "body":
        raise OSError("planted in the body")


def loop():
    if way == "sizer":
        for number, batch in enumerate(sizer.batches(data())):
            sizer.step(batch, cross_entropy)
            if number == 1:
                fail_in_optimizer()
            optimizer.step()
            optimizer.zero_grad()
        return
    for number, batch in enumerate(data()):
        cross_entropy(model, batch).backward()
        if number == 1:
            fail_in_optimizer()
        optimizer.step()
        optimizer.zero_grad()


try:
    loop()
except brimful.RankFailed as error:
    print(f"heard: {type(error).__name__}, rank {error.rank}, {error}")
    sys.exit(7)
except Exception as error:
    if place == "body" and way == "sizer" and sys.argv[5] == "exits":
        sys.exit(3)
    raise
"""


@pytest.mark.parametrize("way", ["sizer", "plain"])
@pytest.mark.parametrize("place", ["loader", "optimizer", "body"])
def test_an_uncaught_error_between_steps_is_heard_with_its_words(way, place):
    (status, heard), (failed, printed) = run_script(SCRIPT, way, place, "raises")
    assert failed == 1, printed
    assert status == 7, heard
    step = 1 if (way, place) == ("sizer", "loader") else 2  # a sizer looks one batch ahead
    assert f"rank 1, step {step} failed on rank 1: " in heard, heard
    words = "TypeError: " if place == "optimizer" else f"OSError: planted in the {place}"
    assert words in heard, heard


def test_a_process_that_ends_between_steps_of_a_loop_is_heard():
    (status, heard), (failed, printed) = run_script(SCRIPT, "sizer", "body", "exits")
    assert failed == 3, printed
    assert status == 7, heard
    assert "rank 1 failed: its process ended between two steps" in heard, heard
