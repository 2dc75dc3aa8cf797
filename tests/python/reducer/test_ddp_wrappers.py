"""Which backward is a step of the group, and which wrapper reduces a parameter."""

import gc

import torch
import torch.nn.functional as F
from ddp_reference import (
    DOUBLE,
    batch_of,
    mean_gradients,
    require_gradients,
    require_same_everywhere,
    small_net,
    train_once,
    wrap,
)
from models import gradients_of, same_bits
from rank_processes import raised
from torch.nn.parallel import DistributedDataParallel

import brimful


def loss_of(output, rank):
    return F.cross_entropy(output, batch_of(rank)[1])


class Odd:
    """An output that shows none of its tensors."""

    def __init__(self, scores):
        self.scores = scores


class Shy(torch.nn.Module):
    """Returns what nobody looks into, and keeps a loss beside it."""

    def __init__(self, returns):
        super().__init__()
        self.net = small_net()
        self.unused = torch.nn.Parameter(torch.ones(2, dtype=DOUBLE))
        self.returns = returns

    def forward(self, x):
        scores = self.net(x)
        self.kept = scores.pow(2).mean()
        return {"odd": Odd(scores), "none": None, "scores": scores}[self.returns]


def local(model, rank, scale=500):
    """A backward of the module itself: no other rank learns of it."""
    (scale * loss_of(model.module(batch_of(rank)[0]), rank)).backward()


def before_any_forward(model, rank):
    if rank == 1:
        local(model, rank)
        model.zero_grad()
    train_once(model, rank)


def after_a_step(model, rank):
    train_once(model, rank)
    model.zero_grad()
    if rank == 1:
        local(model, rank)
        local(model, rank)
        model.zero_grad()
    train_once(model, rank)


def after_no_sync(model, rank):
    with model.no_sync():
        train_once(model, rank)
    model.zero_grad()
    if rank == 1:
        local(model, rank)
        model.zero_grad()
    train_once(model, rank)


def after_a_sizer(model, rank):
    sizer = brimful.BatchSizer(model)
    sizer.step(batch_of(rank), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    model.zero_grad()
    if rank == 1:
        local(model, rank)
        model.zero_grad()
    train_once(model, rank)


def between_two_steps(model, rank):
    """Its own gradient is there when the next step begins, and is reduced with it, as in torch."""
    train_once(model, rank)
    model.zero_grad()
    if rank == 1:
        local(model, rank, 2)
    train_once(model, rank)


LOCAL = [before_any_forward, after_a_step, after_no_sync, after_a_sizer, between_two_steps]


def local_job(rank):
    once = mean_gradients(small_net(), rank.size, train_once)
    for case in LOCAL:
        model = wrap(small_net())
        case(model, rank.index)
        if case is between_two_steps:
            torchs = DistributedDataParallel(small_net())
            case(torchs, rank.index)
            require_gradients(model, gradients_of(torchs))
        else:
            require_gradients(model, once)
        require_same_everywhere(rank, {n: p.grad for n, p in model.named_parameters()})
    model = wrap(small_net())
    if rank.index == 1:
        local(model, 1, 1)
        alone = small_net()
        train_once(alone, 1)
        assert same_bits(gradients_of(model), gradients_of(alone))
        assert model.reducer.counters.launches == 0


def test_a_backward_whose_forward_did_not_pass_the_wrapper_stays_local(ranks):
    ranks(local_job)


def backward_of(model, rank, returns, **options):
    output = model(batch_of(rank)[0])
    loss = (
        loss_of(output.scores if returns == "odd" else output, rank)
        if returns != "none"
        else getattr(model, "module", model).kept
    )
    loss.backward(**options)


def outputs_job(rank):
    for returns in ("odd", "none", "scores"):

        def once(model, rank, returns=returns):
            backward_of(model, rank, returns)

        expected = mean_gradients(Shy(returns), rank.size, once)
        model = wrap(Shy(returns))
        for _ in range(2):
            once(model, rank.index)
            require_gradients(model, expected)
            model.zero_grad()
        if returns == "odd":  # as many backwards as forwards
            outputs = [model(batch_of(rank.index)[0]) for _ in range(2)]
            for output in outputs:
                loss_of(output.scores, rank.index).backward()
            doubled = {n: None if g is None else 2 * g for n, g in expected.items()}
            require_gradients(model, doubled)
    # A loss that the module kept is a part of its forward.
    model = wrap(Shy("scores"))
    model(batch_of(rank.index)[0])
    model.module.kept.backward()
    require_same_everywhere(
        rank, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    )


def test_a_backward_reduces_whatever_the_forward_returned(ranks):
    ranks(outputs_job)


def inputs_job(rank):
    """All parameters as inputs are a whole backward, also beside others."""
    for returns in ("odd", "scores"):
        expected = mean_gradients(
            Shy(returns), rank.size, lambda m, r, returns=returns: backward_of(m, r, returns)
        )
        for more in ([], [torch.ones((), dtype=DOUBLE, requires_grad=True)]):
            model = wrap(Shy(returns))
            for _ in range(2):
                inputs = [*model.parameters(), *more]
                backward_of(model, rank.index, returns, inputs=inputs)
                require_gradients(model, expected)
                model.zero_grad()
    model = wrap(Shy("scores"))
    with model.no_sync():
        backward_of(model, rank.index, "scores", inputs=list(model.parameters()))
    assert model.reducer.counters.launches == 0
    backward_of(model, rank.index, "scores")
    require_gradients(model, {n: None if g is None else 2 * g for n, g in expected.items()})
    # Parameters that were frozen cannot be inputs: the rest is all.
    model = wrap(small_net())
    model.module[0].requires_grad_(False)
    inputs = [p for p in model.parameters() if p.requires_grad]
    F.cross_entropy(model(batch_of(rank.index)[0]), batch_of(rank.index)[1]).backward(inputs=inputs)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert list(found) == ["module.2.weight", "module.2.bias"]
    require_same_everywhere(rank, found)


def test_a_backward_of_all_parameters_as_inputs_reduces(ranks):
    ranks(inputs_job)


class Changes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = small_net(), torch.nn.Linear(3, 3).double()
        self.second.load_state_dict({"weight": torch.eye(3), "bias": torch.zeros(3)})

    def forward(self, x):
        return self.second(self.first(x))


def replace(net):
    net.second.weight = torch.nn.Parameter(2 * net.second.weight.detach())


def add(net):
    net.second = torch.nn.Sequential(net.second, torch.nn.Linear(3, 3).double())
    torch.nn.init.ones_(net.second[1].weight)


def unfreeze(net):
    net.first.requires_grad_(True)


def again_job(rank):
    """As the remedy of PlanMismatch says, in its handler: the wrapper that failed is still alive."""
    for change in (replace, add, unfreeze):
        net = Changes()
        net.first.requires_grad_(change is not unfreeze)
        model = wrap(net)
        train_once(model, rank.index)
        model.zero_grad()
        change(net)
        try:
            train_once(model, rank.index)
            raise AssertionError("the change went unseen")
        except brimful.PlanMismatch:
            before, model = model, wrap(net)
            for _ in range(2):
                train_once(model, rank.index)
                require_gradients(model, mean_gradients(net, rank.size, train_once))
                model.zero_grad()
            del before
    # One rank alone changes its model: the others learn of it in their step, and all wrap again.
    net = Changes()
    model = wrap(net)
    if rank.index == 1:
        replace(net)
    error = raised(train_once, model, rank.index)
    assert type(error) is (brimful.PlanMismatch if rank.index == 1 else brimful.RankFailed), error
    net = Changes()
    replace(net)
    model = wrap(net)
    train_once(model, rank.index)
    require_gradients(model, mean_gradients(net, rank.size, train_once))
    # The same in the handlers, of one module.
    net = Changes()
    model = wrap(net)
    if rank.index == 1:
        replace(net)
    try:
        train_once(model, rank.index)
    except brimful.RankFailed:
        replace(net)
        model = wrap(net)
    except brimful.PlanMismatch:
        model = wrap(net)
    train_once(model, rank.index)
    require_gradients(model, mean_gradients(net, rank.size, train_once))


def test_a_module_that_is_wrapped_again_while_its_wrapper_lives_is_reduced_once(ranks):
    ranks(again_job)


class Headed(torch.nn.Module):
    def __init__(self, trunk):
        super().__init__()
        self.trunk = trunk
        self.head = torch.nn.Linear(3, 3).double()
        torch.nn.init.eye_(self.head.weight)

    def forward(self, x):
        return self.head(self.trunk(x))


def two_wrappers_job(rank):
    """The later wrapper has the parameters; the earlier one says so where it would be wrong."""
    x, y = batch_of(rank.index)
    for made in (lambda net: net, Headed, lambda net: Headed(net).trunk):
        net = small_net()
        first = wrap(net)
        train_once(first, rank.index)
        first.zero_grad()
        later = wrap(made(net))
        expected = mean_gradients(later.module, rank.size, train_once)
        train_once(later, rank.index)
        require_gradients(later, expected)
        later.zero_grad()
        error = raised(first, x)
        assert type(error) is RuntimeError, error
        assert "(parameter: 0.weight)" in str(error) and "later" in str(error)
        sizer = brimful.BatchSizer(first)
        assert "later" in str(
            raised(sizer.step, (x, y), lambda m, b: F.cross_entropy(m(b[0]), b[1]))
        )
        with torch.no_grad():
            assert first(x).shape == (len(x), 3)
        first.zero_grad()
        train_once(later, rank.index)
        require_gradients(later, expected)
    # Two heads on one trunk: the first one's wrapper has lost the trunk.
    trunk = small_net()
    first, later = wrap(Headed(trunk)), wrap(Headed(trunk))
    assert "(parameter: trunk.0.weight)" in str(raised(first, x))
    del first
    gc.collect()
    train_once(later, rank.index)
    require_gradients(later, mean_gradients(later.module, rank.size, train_once))


def test_of_two_wrappers_of_a_parameter_the_later_one_reduces_it(ranks):
    ranks(two_wrappers_job)


def nested_job(rank):
    for kind in (wrap, DistributedDataParallel):
        inner = kind(small_net())
        for outer in (inner, Headed(inner)):
            error = raised(wrap, outer)
            assert type(error) is ValueError, error
            assert "wrapped already" in str(error)
            assert ("'trunk'" in str(error)) == (outer is not inner)
        train_once(inner, rank.index)
        require_gradients(inner, mean_gradients(small_net(), rank.size, train_once))


def test_a_module_with_a_wrapped_part_is_refused(ranks):
    ranks(nested_job)


def in_backward_job(rank):
    """An optimizer that steps in backward is refused after wrapping as before it."""
    from torch.distributed.optim import _apply_optimizer_in_backward  # slow to import

    errors = {}
    for case in ("all", "one parameter", "one rank"):
        net = small_net()
        model = wrap(net)
        train_once(model, rank.index)
        model.zero_grad()
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        if case != "one rank" or rank.index == 1:
            chosen = net.parameters() if case == "all" else [net[2].bias]
            _apply_optimizer_in_backward(torch.optim.SGD, chosen, {"lr": 0.1})
        errors[case] = raised(train_once, model, rank.index)
        model.zero_grad()  # the others learn of it
        assert same_bits({n: p.detach() for n, p in net.named_parameters()}, before), case
    model = wrap(small_net())
    for _ in range(2):  # of another model: nothing to refuse
        train_once(model, rank.index)
        _apply_optimizer_in_backward(torch.optim.SGD, small_net().parameters(), {"lr": 0.1})
    return errors


def test_an_optimizer_in_backward_is_refused_after_wrapping_too(ranks):
    first, second = ranks(in_backward_job)
    for case, error in second.items():
        assert type(error) is NotImplementedError, (case, error)
        assert "optimizer.step() after backward" in str(error)
    heard = first.pop("one rank")
    assert type(heard) is brimful.RankFailed and "runs in backward" in str(heard), heard
    assert all(type(error) is NotImplementedError for error in first.values()), first
