"""Two models on the same ranks: in one step, in one backward, in turns, and in another order on another rank."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import (
    Branches,
    FaultOnce,
    classes,
    cross_entropy,
    gradients_of,
    relative_difference,
    require_equal_replicas,
    same_bits,
    seed,
    two_nets,
    values_of,
    wrap,
)
from rank_processes import raised

import brimful
from brimful.reducer._whole_path import whole_path


def generator_net():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6))


def discriminator_net():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))


def gan_loss(models, real):
    """Both players' losses in one step; the generator's goes through a frozen discriminator."""
    generator, discriminator = models
    fake = generator(torch.randn(len(real), 4))
    judged = discriminator(torch.cat([real, fake.detach()])).squeeze(1)
    truth = torch.cat([torch.ones(len(real)), torch.zeros(len(real))])
    frozen = {n: p.detach() for n, p in discriminator.module.named_parameters()}
    fooled = torch.func.functional_call(discriminator.module, frozen, (fake,)).squeeze(1)
    return F.binary_cross_entropy_with_logits(judged, truth) + F.binary_cross_entropy_with_logits(
        fooled, torch.ones(len(real))
    )


def gan_job(rank):
    seed(0)
    models = [wrap(generator_net()), wrap(discriminator_net())]
    initial = [values_of(model) for model in models]
    fault = FaultOnce([p for model in models for p in model.parameters()])
    retried = fired = 0

    def train(at=None, splits=(None, None)):
        nonlocal retried, fired
        for model, values in zip(models, initial, strict=True):
            model.module.load_state_dict(values)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        sizer = brimful.BatchSizer(models, optimizers)
        seed(rank.index)
        fault.arm(at)
        found = []
        for step in range(2):
            real = classes(6 + rank.index, seed=10 * step + rank.index)[0]
            outcome = sizer.step(real, gan_loss, split=splits[step])
            found.append(outcome.split)
            retried += outcome.retries
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        fired += fault.fired
        require_equal_replicas(*models)
        return [values_of(model) for model in models], found, torch.get_rng_state()

    for at in range(8):
        for faulty in range(rank.size):
            ended, splits, random = train(at if rank.index == faulty else None)
            replayed, _, random_again = train(None, splits)
            assert all(same_bits(a, b) for a, b in zip(ended, replayed, strict=True)), at
            assert torch.equal(random, random_again), at
    return fired, retried


def test_a_shortage_in_either_module_of_a_gan_leaves_no_trace(ranks):
    for fired, retried in ranks(gan_job):
        assert fired == 8
        assert retried >= 8


def both_losses(models, piece):
    return sum(cross_entropy(model, piece) for model in models)


def plain_between_job(rank, at):
    models = g, d = [wrap(net, bucket_cap_mb=0.00002) for net in two_nets()]
    sizer = brimful.BatchSizer([g, d])
    batch = classes(8, seed=rank.index)
    sizer.step(batch, both_losses)
    for model in models:
        model.zero_grad()
    d(batch[0]).sum().backward()
    d.zero_grad()
    fired = []

    def fail(_):
        if not fired:
            fired.append(True)
            raise torch.OutOfMemoryError("planted")

    if rank.index == 1:
        list(d.parameters())[at].register_hook(fail)
    outcome = sizer.step(batch, both_losses)
    assert len(fired) == rank.index
    for model in models:
        gradients = [None] * rank.size
        dist.all_gather_object(gradients, gradients_of(model))
        assert same_bits(*gradients)
    return outcome.retries


@pytest.mark.parametrize("at", range(4))
def test_a_plain_backward_between_steps_of_two_modules_does_not_disturb_a_shortage(ranks, at):
    assert ranks(plain_between_job, at, timeout_s=5)[1] >= 1


def other_optimizer_job(rank):
    with whole_path():
        a, b = (wrap(net) for net in two_nets())
    optimizer = torch.optim.SGD(a.parameters(), lr=0.1)
    other = torch.optim.SGD(b.parameters(), lr=0.1)
    batch = classes(8, seed=rank.index)
    b_start = values_of(b)
    for _ in range(2):
        a_loss, b_loss = cross_entropy(a, batch), cross_entropy(b, batch)
        a_loss.backward()
        optimizer.step()  # while b waits for its backward
        optimizer.zero_grad()
        b_loss.backward()
        other.step()
        other.zero_grad()
    b.reducer.prepare_forward()  # a forward that is still running
    cross_entropy(a, batch).backward()
    optimizer.step()
    assert b.reducer.owes
    output = b.module(batch[0])
    b.reducer.watch(output)
    output.sum().backward()
    return not same_bits(values_of(b), b_start)


@pytest.mark.parametrize("size", [1, 2])
def test_the_optimizer_of_one_model_leaves_the_open_forward_of_another_alone(ranks, size):
    assert ranks(other_optimizer_job, size=size, timeout_s=5) == [True] * size


def nets_of(sizes):
    torch.manual_seed(3)
    other = (6, 8) if sizes == "equal" else (6, 20)
    return [
        torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.Tanh(), torch.nn.Linear(b, 3)).double()
        for a, b in ((6, 8), other)
    ]


def double_batch(rank, step=0):
    return classes(6, seed=10 * step + rank, dtype=torch.float64)


def mean_gradients_of(nets, size):
    means = []
    for net in copy.deepcopy(nets):
        sum(cross_entropy(net, double_batch(r)) / size for r in range(size)).backward()
        means.append(gradients_of(net))
    return means


def require_means(models, means):
    for model, mean in zip(models, means, strict=True):
        assert relative_difference(gradients_of(model), mean) < 1e-12
        model.zero_grad()


def require_refused(errors, models, about):
    """On every rank, with names, and nothing of it is left."""
    for error in errors:
        assert isinstance(error, ValueError), (about, error)
        assert "different models (rank 0: " in str(error), (about, error)
        assert "with parameter 0.weight" in str(error), (about, error)
    for model in models:
        assert all(p.grad is None for p in model.parameters()), about


def order_job(rank, sizes):
    """One rank runs the backwards of two models in another order, in any step."""
    nets = nets_of(sizes)
    means = mean_gradients_of(nets, rank.size)
    models = [wrap(net, bucket_cap_mb=0.0001) for net in nets]
    for odd in range(rank.size):
        for at in range(3):
            for step in range(3):
                other = step == at
                turn = models[::-1] if other and rank.index == odd else models
                errors = [
                    raised(lambda m=m: cross_entropy(m, double_batch(rank.index)).backward())
                    for m in turn
                ]
                if other:
                    require_refused(errors, models, (odd, at))
                else:
                    assert errors == [None, None], (odd, at, step, errors)
                    require_means(models, means)
    # The same order of sizers, of the models of one sizer, and of models in one backward.
    batch = double_batch(rank.index)

    def of_both(models, batch):
        return sum(cross_entropy(model, batch) for model in models)

    def in_one_backward(turn):
        of_both(turn, batch).backward()

    for odd in range(rank.size):
        turn = models[::-1] if rank.index == odd else models
        sizers = [brimful.BatchSizer(model) for model in models]
        for step in range(3):
            errors = [
                raised(sizer.step, batch, cross_entropy)
                for sizer in (sizers[::-1] if rank.index == odd and step == 1 else sizers)
            ]
            if step == 1:
                require_refused(errors, models, ("sizers", odd))
            else:
                assert errors == [None, None], (odd, step, errors)
                require_means(models, means)
            error = raised(in_one_backward, turn if step == 1 else models)
            if step == 1:
                require_refused([error], models, ("one backward", odd))
            else:
                assert error is None, (odd, step, error)
                require_means(models, means)
        sizer = brimful.BatchSizer(turn)
        for _ in range(2):
            error = raised(sizer.step, batch, of_both)
            require_refused([error], models, ("models of a sizer", odd))
        brimful.BatchSizer(models).step(batch, of_both)
        require_means(models, means)
    return models[0].reducer.counters.steps


@pytest.mark.parametrize("sizes", ["equal", "other"])
@pytest.mark.parametrize("size", [2, 3])
def test_models_in_another_order_on_another_rank_raise_on_all(ranks, sizes, size):
    ranks(order_job, sizes, size=size, watchdog_s=60)


def unused_order_job(rank):
    """What ranks use differs, so that buckets of two models fill in another order."""
    nets = [Branches().double(), Branches().double()]
    models = [wrap(net, bucket_cap_mb=0.0001) for net in copy.deepcopy(nets)]
    for step in range(4):
        chosen = [(rank.index + step) % 3, None]
        for own in (nets, models):
            for model, branch in zip(own, chosen, strict=True):
                getattr(model, "module", model).branch = branch
        sum(cross_entropy(model, double_batch(rank.index)) for model in models).backward()
        for net in nets:
            net.zero_grad()
        for other in range(rank.size):
            nets[0].branch = (other + step) % 3
            (sum(cross_entropy(net, double_batch(other)) for net in nets) / rank.size).backward()
        for model, net in zip(models, nets, strict=True):
            mine, expected = gradients_of(model), gradients_of(net)
            for name, gradient in expected.items():
                assert (mine[name] is None) == (gradient is None), name
                assert gradient is None or torch.allclose(mine[name], gradient, 1e-12), name
            model.zero_grad()


def test_two_models_in_one_backward_whose_buckets_fill_in_another_order(ranks):
    ranks(unused_order_job)


def faults_of_two_job(rank, together):
    """A fault at any place of two models' step, on any rank: all raise, and the next step works."""
    nets = nets_of("other")
    means = mean_gradients_of(nets, rank.size)
    models = [wrap(net, bucket_cap_mb=0.0001) for net in nets]
    fault = FaultOnce([p for model in models for p in model.parameters()])
    failing_forward = [None]

    def in_forward(module, *_):
        if failing_forward[0] is module:
            failing_forward[0] = None
            raise ValueError("planted in forward")

    for net in nets:
        net.register_forward_pre_hook(in_forward)

    def step():
        batch = double_batch(rank.index)
        if together:
            sum(cross_entropy(model, batch) for model in models).backward()
        else:
            for model in models:
                cross_entropy(model, batch).backward()

    raised_count = 0
    failing_forward[0] = nets[0] if rank.index == 1 else None
    assert raised(step) is not None  # the very first step
    for model in models:
        model.zero_grad()
    for scope in (False, True):
        for faulty in range(rank.size):
            for at in [*range(8), *nets]:
                mine = rank.index == faulty
                if isinstance(at, int):
                    fault.arm(at if mine else None)
                else:
                    failing_forward[0] = at if mine else None

                def scoped():
                    with models[0].step():
                        step()

                error = raised(scoped if scope else step)
                if mine:
                    planted = torch.OutOfMemoryError if isinstance(at, int) else ValueError
                    assert type(error) is planted and "planted" in str(error), (at, error)
                else:
                    assert isinstance(error, brimful.RankFailed), (faulty, at, error)
                    assert error.rank == faulty and "failed on rank" in str(error), error
                    assert error.seconds < 3, error
                    if scope:
                        assert "planted" in str(error), (at, error)
                raised_count += 1
                for model in models:
                    model.zero_grad()
                step()
                require_means(models, means)
    return raised_count


@pytest.mark.parametrize("together", [True, False])
def test_a_fault_anywhere_in_a_plain_step_of_two_models_raises_on_all_ranks(ranks, together):
    assert ranks(faults_of_two_job, together, watchdog_s=60) == [40, 40]


def failure_after_backward_job(rank):
    """What fails after the backward of two models fails the next step of both: no sum is kept of either."""
    nets = nets_of("other")
    means = mean_gradients_of(nets, rank.size)
    models = [wrap(net, bucket_cap_mb=0.0001) for net in nets]
    batch = double_batch(rank.index)

    def step(fails=False):
        with models[1].step():
            sum(cross_entropy(model, batch) for model in models).backward()
            if fails:
                raise ValueError("planted after backward")

    for faulty in range(rank.size):
        error = raised(step, rank.index == faulty)
        assert isinstance(error, ValueError) == (rank.index == faulty), error
        require_means(models, means)
        error = raised(step)
        assert isinstance(error, brimful.RankFailed) and error.rank == faulty, error
        assert "planted after backward" in str(error), error
        for model in models:
            assert all(p.grad is None for p in model.parameters()), faulty
        step()
        require_means(models, means)


def test_a_failure_after_the_backward_of_two_models_fails_the_next_step_of_both(ranks):
    ranks(failure_after_backward_job, watchdog_s=60)
