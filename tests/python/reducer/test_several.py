"""Several things at once: two modules in a step, sparse gradients, collectives inside the model, torch's DDP beside."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import (
    FaultOnce,
    Words,
    classes,
    cross_entropy,
    gradients_of,
    relative_difference,
    same_bits,
    seed,
    values_of,
    words_batch,
    wrap,
)
from rank_processes import raised
from torch.utils.checkpoint import checkpoint

import brimful


def require_equal_replicas(*modules):
    mine = [values_of(module) for module in modules]
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    for other in everybody:
        assert all(same_bits(a, b) for a, b in zip(mine, other, strict=True))


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


def sparse_job(rank, sparse_last):
    net = Words(sparse_last)
    model = wrap(copy.deepcopy(net))
    fault = FaultOnce(model.parameters())
    batches = [words_batch(5 + r, r) for r in range(rank.size)]
    total = sum(len(b[1]) for b in batches)
    sum(cross_entropy(net, b) * len(b[1]) / total for b in batches).backward()
    expected = gradients_of(net)
    fired = 0
    for faulty in range(rank.size):
        for at in [None, *range(5)]:
            fault.arm(at if rank.index == faulty else None)
            brimful.BatchSizer(model).step(batches[rank.index], cross_entropy)
            fired += fault.fired
            assert model.module.words.weight.grad.is_sparse
            assert relative_difference(gradients_of(model), expected) < 1e-6, at
            model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        cross_entropy(model, batches[rank.index]).backward()  # a plain loop
        optimizer.step()
        optimizer.zero_grad()
    require_equal_replicas(model)
    return fired


@pytest.mark.parametrize("sparse_last", [False, True])
def test_sparse_gradients_survive_a_shortage(ranks, sparse_last):
    assert ranks(sparse_job, sparse_last) == [5, 5]


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SyncedNorm(torch.nn.SyncBatchNorm):
    """torch's class refuses CPU tensors: the same over gloo."""

    def forward(self, x):
        sums = SumOverRanks.apply(torch.cat([x.sum(0), (x * x).sum(0), x.new_tensor([len(x)])]))
        count = sums[-1].detach()
        mean, square = sums[:-1].view(2, -1) / count
        variance = square - mean * mean
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias


def normed_net(norm):
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), norm(8), torch.nn.Linear(8, 3)).double()


def whole_batch_gradients(size):
    reference = normed_net(torch.nn.BatchNorm1d)
    batches = [classes(5 + 7 * r, seed=r, dtype=torch.float64) for r in range(size)]
    whole = tuple(torch.cat(part) for part in zip(*batches, strict=True))
    cross_entropy(reference, whole).backward()
    return batches, gradients_of(reference), reference[1].running_var


def lockstep_job(rank):
    batches, expected, variance = whole_batch_gradients(rank.size)
    model = wrap(normed_net(SyncedNorm))
    sizer = brimful.BatchSizer(model)
    outcome = sizer.step(batches[rank.index], cross_entropy)
    assert outcome.pieces == 1
    gradients = gradients_of(model)
    assert (
        relative_difference(
            {n: g for n, g in gradients.items() if n != "0.bias"},
            {n: g for n, g in expected.items() if n != "0.bias"},  # 0 but for rounding
        )
        < 1e-10
    )
    assert torch.allclose(model.module[1].running_var, variance, rtol=1e-12)
    model.zero_grad()
    pieces = brimful.BatchSizer(model, pieces=1 + 5 * rank.index)  # rank 0 wants 1, rank 1 wants 6
    taken = pieces.step(batches[rank.index], cross_entropy)
    finite = all(bool(g.isfinite().all()) for g in gradients_of(model).values())
    model.zero_grad()
    require_equal_replicas(model)
    return taken.pieces, finite, taken.weight


def test_collectives_in_the_model_match_and_give_the_gradients_of_the_whole_batch(ranks):
    # rank 0 has fewer rows than pieces: some of its pieces are empty
    assert ranks(lockstep_job) == [(6, True, 17.0)] * 2


def lockstep_shortage_job(rank, point):
    model = wrap(normed_net(SyncedNorm))
    batch = classes(8, seed=rank.index, dtype=torch.float64)
    sizer = brimful.BatchSizer(model)
    sizer.step(batch, cross_entropy)
    model.zero_grad()
    before = values_of(model)

    def planted(*_):
        raise torch.OutOfMemoryError("planted")

    if rank.index == 1:
        if point == "forward":
            model.module[1].register_forward_pre_hook(planted)
        else:
            model.module[2].weight.register_hook(planted)
    error = raised(sizer.step, batch, cross_entropy)
    assert same_bits(values_of(model), before)
    return error


@pytest.mark.parametrize("point", ["forward", "backward"])
def test_a_shortage_between_collectives_of_the_model_fails_on_all_ranks(ranks, point):
    healthy, failed = ranks(lockstep_shortage_job, point, timeout_s=5)
    assert type(failed) is brimful.BatchTooLarge and "planted" in str(failed)
    assert type(healthy) is brimful.RankOutOfMemory, healthy
    assert healthy.rank == 1 and "planted" in str(healthy)
    assert max(healthy.seconds, failed.seconds) < 8


def falling_budget_job(rank, rows, max_retries):
    torch.manual_seed(0)
    model = wrap(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)))
    before = values_of(model)
    sizer = brimful.BatchSizer(model, max_retries=max_retries)
    pieces = []

    def fall(_):
        brimful.memory.set_limit("cpu", brimful.memory.stats("cpu").used_bytes)

    def loss(model, piece):
        brimful.memory.set_limit("cpu", None)
        pieces.append(len(piece[1]))
        return cross_entropy(model, piece)

    handle = model.module[2].bias.register_hook(fall) if rank.index == 1 else None
    error = raised(sizer.step, classes(rows, seed=rank.index), loss)
    brimful.memory.set_limit("cpu", None)
    assert same_bits(values_of(model), before)
    assert all(p.grad is None for p in model.parameters())
    if handle:
        handle.remove()
    model.zero_grad()
    sizer.step(classes(rows, seed=rank.index), loss)
    gradients = [None] * rank.size
    dist.all_gather_object(gradients, gradients_of(model))
    assert same_bits(gradients[0], gradients[1])
    return error, pieces


@pytest.mark.parametrize(("rows", "max_retries", "tries"), [(16, 2, [16, 8, 4]), (3, 8, [3, 2, 1])])
def test_a_budget_that_keeps_falling_ends_on_all_ranks(ranks, rows, max_retries, tries):
    (healthy, _), (failed, pieces) = ranks(falling_budget_job, rows, max_retries)
    assert type(failed) is brimful.BatchTooLarge
    assert f"max_retries: {max_retries}" in str(failed) and f"retries: {len(tries) - 1}" in str(
        failed
    )
    assert type(healthy) is brimful.RankOutOfMemory
    assert healthy.rank == 1 and "CPU out of memory" in str(healthy)
    assert pieces[: len(tries)] == tries  # the first piece of each try is where memory ran out


def two_nets(sizes):
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
    nets = two_nets(sizes)
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
    nets = two_nets("other")
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


class Twice(torch.nn.Module):
    """A layer that reentrant checkpointing gives two gradients in one backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.first = torch.nn.Linear(6, 3)
        self.shared = torch.nn.Linear(3, 3)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True))
        return x


def twice_job(rank, with_sizer):
    net = Twice()
    model = wrap(copy.deepcopy(net), bucket_cap_mb=0.00002)
    batches = [classes(6, seed=r) for r in range(rank.size)]
    sum(cross_entropy(net, batch) / rank.size for batch in batches).backward()
    sizer = brimful.BatchSizer(model) if with_sizer else None
    retries, errors = [], []
    for _ in range(3):
        if sizer:
            retries.append(sizer.step(batches[rank.index], cross_entropy).retries)
        else:
            errors.append(raised(lambda: cross_entropy(model, batches[rank.index]).backward()))
            if errors[-1] is not None:
                model.zero_grad()
                continue
        assert relative_difference(gradients_of(model), gradients_of(net)) < 1e-6
        model.zero_grad()
    return retries, errors


def test_a_late_gradient_is_repeated_once_and_learned(ranks):
    for retries, _ in ranks(twice_job, True):
        assert retries == [1, 0, 0]


def test_a_late_gradient_in_a_plain_loop_names_parameter_and_remedy(ranks):
    for _, errors in ranks(twice_job, False):
        assert errors[1:] == [None, None]
        assert "(parameter: shared." in str(errors[0])
        assert "use_reentrant=False" in str(errors[0])


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.common = torch.nn.Linear(6, 8)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(8, 3) for _ in range(3))
        self.branch = None  # all

    def forward(self, x):
        x = torch.tanh(self.common(x))
        if self.branch is not None:
            return self.branches[self.branch](x)
        return sum(branch(x) for branch in self.branches)


def beside_torch(rank, branch, unused=False):
    """Our class and torch's around equal modules."""
    ours, theirs = Branches(), Branches()
    ours.branch = theirs.branch = branch
    torch_class = torch.nn.parallel.DistributedDataParallel
    return wrap(ours), torch_class(theirs, find_unused_parameters=unused)


def plain_loops_job(rank):
    ours, theirs = beside_torch(rank, None)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    worst = 0.0
    for step in range(4):
        batch = classes(8, seed=10 * step + rank.index)
        for model in (ours, theirs):
            cross_entropy(model, batch).backward()
        worst = max(worst, relative_difference(gradients_of(ours), gradients_of(theirs)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    require_equal_replicas(ours)
    return worst


def test_a_plain_loop_gives_the_gradients_of_torchs_class(ranks):
    assert max(ranks(plain_loops_job)) < 1e-6
    assert max(ranks(plain_loops_job, size=3)) < 1e-6


def accumulation_job(rank):
    ours, theirs = beside_torch(rank, None)
    worst = 0.0
    for step in range(3):
        for model in (ours, theirs):
            for part in range(2):
                with model.no_sync():
                    cross_entropy(model, classes(4, seed=9 * step + part)).backward()
            cross_entropy(model, classes(4, seed=100 + rank.index)).backward()
        worst = max(worst, relative_difference(gradients_of(ours), gradients_of(theirs)))
        ours.zero_grad()
        theirs.zero_grad()
    for model in (ours, theirs):  # synchronised twice, without zero_grad between
        for part in range(2):
            cross_entropy(model, classes(4, seed=rank.index + 7 * part)).backward()
    return max(worst, relative_difference(gradients_of(ours), gradients_of(theirs)))


def test_accumulated_gradients_are_those_of_torchs_class(ranks):
    assert max(ranks(accumulation_job)) < 1e-6


def unused_job(rank):
    ours, theirs = beside_torch(rank, rank.index, unused=True)
    worst = 0.0
    for step in range(3):
        batch = classes(8, seed=10 * step + rank.index)
        for model in (ours, theirs):
            cross_entropy(model, batch).backward()
        mine, other = gradients_of(ours), gradients_of(theirs)
        never = [name for name, gradient in mine.items() if gradient is None]
        assert never == [name for name, gradient in other.items() if gradient is None]
        assert never == ["branches.2.weight", "branches.2.bias"]
        for name in never:
            del mine[name], other[name]
        worst = max(worst, relative_difference(mine, other))
        ours.zero_grad()
        theirs.zero_grad()
    return worst


def test_parameters_unused_on_some_ranks_are_treated_as_by_torchs_class(ranks):
    assert max(ranks(unused_job)) < 1e-6
