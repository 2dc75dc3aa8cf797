"""Control records that go between hosts: steps end as with those in the last bucket."""

import gc
import itertools
import logging

import pytest
import torch
from models import classes, cross_entropy, dropout_net, same_bits, seed, two_nets, values_of, wrap
from rank_processes import raised
from record_transports import TRANSPORTS, Lines, over, threads

import brimful
from brimful.reducer._between_hosts import between_hosts

STEPS = 3


class Shortage:
    """Rank 1 runs out of memory once, in the second step, when buckets were launched."""

    def __init__(self, model, rank):
        self.due = False
        self.armed = rank == 1
        model.module[0].weight.register_hook(self)

    def __call__(self, _):
        if self.due and self.armed:
            self.armed = False
            raise torch.OutOfMemoryError("planted")


def sizer_job(rank):
    model = wrap(dropout_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizer = brimful.BatchSizer(model, optimizer)
    shortage = Shortage(model, rank.index)
    seed(rank.index)
    outcomes = []
    for step in range(STEPS):
        shortage.due = step == 1
        outcomes.append(
            sizer.step(classes(8 + rank.index, seed=10 * step + rank.index), cross_entropy)
        )
        optimizer.step()
        optimizer.zero_grad()
    figures = [(o.loss, o.weight, o.retries, o.split) for o in outcomes]
    return values_of(model), figures, model.reducer.counters.host_exchanges


def plain_job(rank):
    model = wrap(dropout_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seed(rank.index)
    errors = []
    for step in range(STEPS):

        def one(step=step):
            with model.step():
                loss = cross_entropy(model, classes(8, seed=10 * step + rank.index))
                if (rank.index, step) == (1, 1):
                    raise ValueError("planted")
                loss.backward()

        error = raised(one)
        errors.append(error and (type(error).__name__, str(error).partition(" (")[0]))
        if error is None:
            optimizer.step()
        optimizer.zero_grad()
    return values_of(model), errors, model.reducer.counters.host_exchanges


def joined_job(rank):
    """Ranks with different numbers of batches."""
    model = wrap(dropout_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seed(rank.index)
    with model.join():
        for step in range(STEPS - rank.index % 2):
            cross_entropy(model, classes(8, seed=step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return values_of(model), None, model.reducer.counters.host_exchanges


# By job: exchanges between hosts of each rank.
JOBS = {
    sizer_job: STEPS + 1,  # one attempt is repeated
    plain_job: STEPS,
    joined_job: STEPS
    + 3,  # one in which no rank has data; where one has none, a second exchange says so by parameter
}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
@pytest.mark.parametrize("size", [2, 3])
def test_steps_end_as_with_records_in_the_last_bucket(ranks, job, size):
    # The last bucket is shorter, so that gloo cuts it elsewhere, and adds the numbers of three ranks in another order.
    in_bucket, hosts = (ranks(over, transport, job, size=size) for transport in TRANSPORTS)
    for (values, figures, none), (others, same, exchanges) in zip(in_bucket, hosts, strict=True):
        if size == 2:
            assert same_bits(values, others) and figures == same
        torch.testing.assert_close(values, others, rtol=1e-5, atol=1e-6)
        assert (none, exchanges) == (0, JOBS[job])


def two_models_job(rank):
    """One group of hosts for both; a step of each, and a step of both."""
    before = threads()
    models = []
    counts = []
    for net in two_nets():
        models.append(wrap(net))
        counts.append(threads() - before)
    for chosen in ([0], [1], [0, 1]):
        for model in models:
            model.zero_grad()
        sum(cross_entropy(models[i], classes(4, seed=rank.index)) for i in chosen).backward()
    exchanges = [model.reducer.counters.host_exchanges for model in models]
    gradients = [[p.grad for p in model.parameters()] for model in models]
    models.clear()
    del model
    gc.collect()
    return counts, threads() - before, exchanges, gradients


def test_all_reducers_of_a_group_share_the_hosts_and_the_last_one_drops_them(ranks):
    in_bucket, hosts = (ranks(over, transport, two_models_job) for transport in TRANSPORTS)
    for (none, _, _, expected), (counts, left, exchanges, gradients) in zip(
        in_bucket, hosts, strict=True
    ):
        assert none == [0, 0]
        assert counts[0] > 0 and counts[1] == counts[0]
        assert left == 0
        assert exchanges == [2, 2]
        for ours, theirs in zip(
            itertools.chain(*gradients), itertools.chain(*expected), strict=True
        ):
            assert torch.equal(ours, theirs)


def one_refuses_job(rank):
    lines = Lines()
    logging.getLogger("brimful").addHandler(lines)
    with between_hosts(rank.index != 1):
        models = [wrap(net) for net in two_nets()]
    for model in models:
        cross_entropy(model, classes(4, seed=rank.index)).backward()
    return lines.lines, [model.reducer.counters.host_exchanges for model in models]


def test_where_a_rank_cannot_connect_its_host_all_do_without_and_say_so_once(ranks):
    for lines, exchanges in ranks(one_refuses_job, size=3):
        assert exchanges == [0, 0]
        assert len(lines) == 1, lines
        assert "in the last bucket, and not between hosts" in lines[0]
        assert "connect their hosts: 1)" in lines[0]
