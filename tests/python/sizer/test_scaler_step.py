"""A sizer with torch's GradScaler beside torch's own loop with one."""

import contextlib

import pytest
import torch
from models import classes, cross_entropy, same_bits, values_of, wrap
from rank_processes import raised

import brimful

STEPS = 12
SPIKES = (3, 4, 8)  # steps whose gradients are not finite


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))


def scaler_of(**options):
    return torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, "growth_interval": 3, **options})


def loss_of(step, autocast=False):
    def loss_fn(model, piece):
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = cross_entropy(model, piece)
        return loss * (float("inf") if step in SPIKES else 1.0)

    return loss_fn


def finish(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def pieces_of(batch, split):
    return zip(*(t.split(split) for t in batch), strict=True)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("split", [[8], [4, 4], [3, 4, 1]])
def test_the_same_as_torchs_loop_with_its_scaler(split, autocast):
    theirs, ours = net(), net()
    their_optimizer, our_optimizer = optimizer_of(theirs), optimizer_of(ours)
    their_scaler, our_scaler = scaler_of(), scaler_of()
    sizer = brimful.BatchSizer(ours, our_optimizer, scaler=our_scaler)
    scales = []
    for step in range(STEPS):
        batch = classes(8, seed=step)
        losses = []
        for piece in pieces_of(batch, split):
            loss = loss_of(step, autocast)(theirs, piece)
            losses.append(loss.item() * len(piece[1]))
            their_scaler.scale(loss * (len(piece[1]) / 8)).backward()
        outcome = sizer.step(batch, loss_of(step, autocast), split=split)
        if step not in SPIKES:
            assert outcome.loss == pytest.approx(sum(losses) / 8, rel=1e-6)
            assert ours[0].weight.grad.abs().max() > 1, "not scaled"
        finish(theirs, their_optimizer, their_scaler)
        finish(ours, our_optimizer, our_scaler)
        assert same_bits(values_of(ours), values_of(theirs)), step
        assert our_scaler.state_dict() == their_scaler.state_dict(), step
        scales.append(our_scaler.get_scale())
    assert min(scales) < 1024 < max(scales), "the scale neither shrank nor grew"


def test_without_a_clip_the_scaler_unscales_once_in_its_step():
    plain, scaled = net(), net()
    scaler = scaler_of()
    for model, given in ((plain, None), (scaled, scaler)):
        optimizer = optimizer_of(model)
        sizer = brimful.BatchSizer(model, optimizer, scaler=given)
        for step in range(2):
            sizer.step(classes(8, seed=step), cross_entropy, split=[5, 3])
            if given is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    assert same_bits(values_of(scaled), values_of(plain))


def test_a_repeated_step_sees_the_same_scale():
    clean, faulty = net(), net()
    seen, tries = [], []

    def loss_fn(model, piece):
        seen.append(scaler.get_scale())
        tries.append(len(piece[1]))
        if len(tries) == 1:
            scaler.update(4.0)  # restored with all else
            raise torch.OutOfMemoryError("planted")
        return cross_entropy(model, piece)

    scaler = scaler_of()
    outcome = brimful.BatchSizer(faulty, scaler=scaler).step(classes(8), loss_fn)
    assert (outcome.retries, tries) == (1, [8, 4, 4])
    assert seen == [1024.0] * 3
    brimful.BatchSizer(clean, scaler=scaler_of()).step(classes(8), cross_entropy, split=[4, 4])
    for ours, theirs in zip(faulty.parameters(), clean.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_step_that_fails_leaves_the_scaler_as_it_was():
    def loss_fn(model, piece):
        scaler.update(4.0)
        raise ValueError("planted")

    scaler = scaler_of()
    sizer = brimful.BatchSizer(net(), scaler=scaler)
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="planted"):
        sizer.step(classes(8), loss_fn)
    assert scaler.state_dict() == before


def test_a_scaler_that_is_not_enabled_changes_nothing_and_another_thing_is_refused():
    plain, passed = net(), net()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    brimful.BatchSizer(plain).step(classes(8), cross_entropy)
    brimful.BatchSizer(passed, scaler=scaler).step(classes(8), cross_entropy)
    assert torch.equal(passed[0].weight.grad, plain[0].weight.grad)
    with pytest.raises(TypeError, match=r"must be a torch.amp.GradScaler \(type: .*float"):
        brimful.BatchSizer(net(), scaler=65536.0)


def test_gradients_of_several_batches_are_unscaled_together():
    plain, scaled = net(), net()
    scaler = scaler_of()
    for model, given in ((plain, None), (scaled, scaler)):
        sizer = brimful.BatchSizer(model, scaler=given)
        for step in range(3):
            sizer.step(classes(8, seed=step), cross_entropy, accumulate=True)
    scaler.unscale_(optimizer_of(scaled))
    for ours, theirs in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def _train(rank, faulty, splits):
    model = wrap(net())
    optimizer, scaler = optimizer_of(model), scaler_of()
    sizer = brimful.BatchSizer(model, optimizer, scaler=scaler)
    fired, split_used, states = [], [], []
    for step in range(STEPS):
        # One rank spikes, and one has no data at the start.
        loss = loss_of(step if rank.index == 1 else -1)
        no_data = rank.index == 1 and step == 0
        batch = brimful.NO_DATA if no_data else classes(8, seed=10 * step + rank.index)

        def loss_fn(model, piece, step=step, loss=loss):
            if faulty and rank.index == 0 and step == 6 and not fired:
                fired.append(model(piece[0]))
                raise torch.OutOfMemoryError("planted")
            return loss(model, piece)

        outcome = sizer.step(batch, loss_fn, split=splits[step] if splits else None)
        split_used.append(None if no_data else outcome.split)
        finish(model, optimizer, scaler)
        states.append(scaler.state_dict())
    return values_of(model), states, split_used


def _ranks_agree(rank):
    values, states, splits = _train(rank, True, None)
    return values, states, splits, _train(rank, False, splits)


def test_all_ranks_leave_out_the_same_steps_and_scale_alike(ranks):
    (values, states, splits, clean), other = ranks(_ranks_agree)
    assert splits[6] == [4, 4]
    assert same_bits(values, other[0]) and states == other[1]
    assert same_bits(values, clean[0]) and states == clean[1]
    reference, scale, tracker = [], 1024.0, 0
    for step in range(STEPS):
        tracker = 0 if step in SPIKES else tracker + 1
        scale = scale / 2 if step in SPIKES else scale
        if tracker == 3:
            scale, tracker = scale * 2, 0
        reference.append(scale)
    assert [state["scale"] for state in states] == reference


def _another_scale(rank):
    model = wrap(net())
    optimizer, scaler = optimizer_of(model), scaler_of()
    sizer = brimful.BatchSizer(model, optimizer, scaler=scaler)
    batch = classes(8, seed=rank.index)
    before = scaler.state_dict()
    if rank.index == 1:
        scaler.update(512.0)
    values = values_of(model)
    error = raised(sizer.step, batch, cross_entropy)
    assert same_bits(values_of(model), values)
    scaler.load_state_dict(before)
    sizer.step(batch, cross_entropy)
    finish(model, optimizer, scaler)
    return type(error), str(error), values_of(model)


def test_another_scale_is_an_error_on_all_ranks(ranks):
    results = ranks(_another_scale)
    for kind, words, values in results:
        assert kind is brimful.PlanMismatch
        assert "scalers with different scales (ranks that differ from rank 0: 1)" in words
        assert same_bits(values, results[0][2])
