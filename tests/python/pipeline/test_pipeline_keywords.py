"""Keywords of a step: cut to microbatches and given to the stages that name them."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from models import gradients_of, relative_difference
from test_pipeline import data
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import brimful
from brimful import Pipeline, Schedule

pytestmark = pytest.mark.usefixtures("no_limit")


class Masked(nn.Module):
    """Takes one keyword, by name."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x, mask, scale: float = 1.0):
        return torch.tanh(self.linear(x)) * mask * scale


class Shifted(Masked):
    """Takes others, one of them as all that there is."""

    def forward(self, x, **kwargs):
        assert set(kwargs) >= {"mask"}
        return self.linear(x) + kwargs.get("shift", 0)


class Plain(Masked):
    def forward(self, x):
        return self.linear(x)


def three():
    torch.manual_seed(0)
    return nn.ModuleList([Masked(), Plain(), Shifted()])


def masks(rows=11):
    generator = torch.Generator().manual_seed(2)
    return torch.rand(rows, 1, generator=generator, dtype=torch.float64)


def whole(model, x, y, mask, shift, scale):
    output = model[2](model[1](model[0](x, mask, scale)), mask=mask, shift=shift)
    loss = F.mse_loss(output, y)
    loss.backward()
    gradients = gradients_of(model)
    model.zero_grad()
    return loss.item(), gradients, output.detach()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_each_stage_gets_the_keywords_that_it_names(schedule):
    model = three()
    x, y = data()
    mask = masks()
    shift = torch.randn(6, dtype=torch.float64)
    loss, gradients, output = whole(model, x, y, mask, shift, 2.0)
    pipe = Pipeline(
        list(model),
        schedule=schedule,
        microbatches=4,
        loss_fn=F.mse_loss,
        kwargs_dim={"shift": None},
    )
    for _ in range(2):
        outcome = pipe.step(x, target=y, mask=mask, shift=shift, scale=2.0)
        assert outcome.loss == pytest.approx(loss, rel=1e-12)
        assert relative_difference(gradients_of(model), gradients) < 1e-12
        model.zero_grad()
    got = pipe.forward(x, mask=mask, shift=shift, scale=2.0)
    torch.testing.assert_close(got, output, rtol=1e-12, atol=0)


def test_keywords_are_structures_too_and_have_rows_where_they_are_said_to():
    seen = []

    def first(x, extra):
        seen.append((extra["h"].shape, extra["names"], extra["k"].shape))
        return x + extra["h"]

    x, y = data()
    last = nn.Linear(6, 6, dtype=torch.float64)
    pipe = Pipeline(
        [first, last],
        microbatches=2,
        loss_fn=F.mse_loss,
        kwargs_dim={"extra": {"k": 1}},
    )
    names = [f"row {i}" for i in range(11)]
    pipe.step(x, y, extra={"h": x, "names": names, "k": torch.zeros(3, 11)})
    assert seen == [((6, 6), names[:6], (3, 6)), ((5, 6), names[6:], (3, 5))]


def test_a_repeated_step_cuts_the_keywords_anew():
    model = three()
    x, y = data()
    mask = masks()
    _, gradients, _ = whole(model, x, y, mask, 0, 1.0)
    full = [True]

    def loss_fn(output, target):
        if full.pop() if full else False:
            raise torch.OutOfMemoryError("planted")
        return F.mse_loss(output, target)

    outcome = Pipeline(list(model), microbatches=3, loss_fn=loss_fn).step(x, y, mask=mask)
    assert (outcome.retries, outcome.pieces) == (1, 6)
    assert relative_difference(gradients_of(model), gradients) < 1e-12


def test_bad_keywords_are_refused_before_anything_runs():
    model = three()
    x, y = data()
    pipe = Pipeline(list(model)[:2], microbatches=3, loss_fn=F.mse_loss)
    with pytest.raises(TypeError, match=r"name: msk, taken: mask, scale"):
        pipe.step(x, y, msk=masks())
    with pytest.raises(TypeError, match="name: msk"):
        pipe.forward(x, msk=masks())
    with pytest.raises(ValueError, match="rows: 11 and 5"):
        pipe.step(x, y, mask=masks(5))
    with pytest.raises(TypeError, match="name: msk"):
        Pipeline(list(model)[:2], loss_fn=F.mse_loss, kwargs_dim={"msk": None})
    with pytest.raises(TypeError, match="mask"):  # Python's own, of the stage that lacks it
        pipe.step(x, y)
    assert all(p.grad is None for p in model.parameters())
    pipe = Pipeline([torch.relu, model[1]], microbatches=3, loss_fn=F.mse_loss)
    with pytest.raises(TypeError, match="taken: none"):
        pipe.step(x, y, mask=masks())
    assert pipe.step(x, y).pieces == 3


def test_keywords_of_a_script_module_are_those_of_its_schema():
    x, y = data()
    mask = masks()
    with warnings.catch_warnings():  # newer versions of torch advise against it
        warnings.simplefilter("ignore")
        first = torch.jit.script(Masked())
    last = Plain()
    F.mse_loss(last(first(x, mask, 3.0)), y).backward()
    model = nn.ModuleList([first, last])
    gradients = gradients_of(model)
    model.zero_grad()
    pipe = Pipeline([first, last], microbatches=4, loss_fn=F.mse_loss)
    pipe.step(x, y, mask=mask, scale=3.0)
    assert relative_difference(gradients_of(model), gradients) < 1e-12
    with pytest.raises(TypeError, match="taken: mask, scale"):
        pipe.step(x, y, masks=mask)


def test_schedules_with_communication_carry_keywords():
    model = three()
    x, y = data()
    mask = masks()
    _, gradients, _ = whole(model, x, y, mask, 0, 1.0)
    order = Schedule("1f1b", 3, 4).with_communication()
    Pipeline(list(model), schedule=order, loss_fn=F.mse_loss).step(x, y, mask=mask)
    assert relative_difference(gradients_of(model), gradients) < 1e-12


class Attends(nn.Module):
    """Attention under a mask that differs from row to row."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x, block_mask):
        heads = self.linear(x).unsqueeze(1)
        if not torch.is_grad_enabled():
            return flex_attention(heads, heads, heads, block_mask=block_mask).squeeze(1)
        # Flex attention has no backward on the CPU.
        dense = create_mask(block_mask.mask_mod, len(x), 1, *block_mask.shape[-2:], device="cpu")
        return F.scaled_dot_product_attention(heads, heads, heads, dense).squeeze(1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("blocks", [11, 1])
def test_a_block_mask_is_cut(blocks):
    torch.manual_seed(0)
    lengths = torch.arange(2, 13)

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (kv < lengths[b]) if blocks > 1 else q >= kv

    mask = create_block_mask(mask_mod, blocks, None, 12, 12, device="cpu", BLOCK_SIZE=4)
    model = nn.ModuleList([Attends(), Attends()])
    x, y = torch.randn(2, 11, 12, 8, dtype=torch.float64)
    output = model[1](model[0](x, mask), mask)
    loss = F.mse_loss(output, y)
    loss.backward()
    gradients = gradients_of(model)
    model.zero_grad()
    pipe = Pipeline(list(model), microbatches=4, loss_fn=F.mse_loss)
    outcome = pipe.step(x, y, block_mask=mask)
    assert outcome.loss == pytest.approx(loss.item(), rel=1e-12)
    assert relative_difference(gradients_of(model), gradients) < 1e-12
    assert torch.allclose(pipe.forward(x, block_mask=mask), output, rtol=1e-12)
    # A mask in the batch, and one that goes from stage to stage.
    pair = Pipeline([lambda parts: (model[0](*parts), parts[1]), lambda parts: model[1](*parts)])
    assert torch.allclose(pair.forward((x, mask)), output, rtol=1e-12)


class Rows:
    """A type of one's own."""

    def __init__(self, scales):
        self.scales = scales


def test_arrays_and_types_of_ones_own_are_cut_and_what_is_unknown_is_refused():
    linear = nn.Linear(6, 6, dtype=torch.float64)

    def first(x, table, rows):
        return linear(x) * torch.from_numpy(table) * torch.tensor(rows.scales)[:, None]

    x, y = data()
    table = masks().numpy()
    rows = Rows([float(i) for i in range(11)])

    def last(h):
        return h

    pipe = Pipeline([first, last], microbatches=4, loss_fn=F.mse_loss)
    with pytest.raises(TypeError, match=r"keywords\['rows'\]: .*Rows.*register_split.*kwargs_dim"):
        pipe.step(x, y, table=table, rows=rows)
    with pytest.raises(TypeError, match=r"batch\[1\]: .*Rows"):
        pipe.step((x, rows), y, table=table, rows=rows)
    brimful.register_split(
        Rows, lambda rows: len(rows.scales), lambda rows, a, b: Rows(rows.scales[a:b])
    )
    expected = F.mse_loss(first(x, table, rows), y).item()
    assert pipe.step(x, y, table=table, rows=rows).loss == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match=r"keywords\['rows'\]: 3"):
        pipe.step(x, y, table=table, rows=Rows([1.0] * 3))
    whole = Rows([2.0])
    shared = Pipeline([first, last], microbatches=4, kwargs_dim={"rows": None})
    torch.testing.assert_close(  # a library may multiply eleven rows otherwise than three
        shared.forward(x, table=table, rows=whole), first(x, table, whole), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("rows, layers", [(11, 3), (2, 3), (4, 8), (3, 2)])
def test_lists_are_read_by_the_rows_of_the_batch(rows, layers):
    x, y = (part[:rows] for part in data())
    weights = [torch.randn(rows, 6, dtype=torch.float64) for _ in range(layers)]
    images = tuple(torch.randn(rows, 3, 6, dtype=torch.float64).unbind())
    linear = nn.Linear(6, 6, dtype=torch.float64)

    def first(x, weights, samples):
        assert len(weights) == layers and len(samples) == len(x)
        return linear(x) * sum(weights) * torch.stack(samples).sum(1)

    def last(h):
        return h

    def loss_fn(h, targets):
        assert len(targets) == layers
        return sum(F.mse_loss(h, target) for target in targets)

    targets = [y * i for i in range(layers)]
    keywords = {"weights": weights, "samples": images}
    pipe = Pipeline([first, last], microbatches=2, loss_fn=loss_fn)
    if rows == 3:  # as many samples as each has rows
        with pytest.raises(ValueError, match=r"\(keywords\['samples'\]: 3 tensors of 3 rows each"):
            pipe.step(x, targets, **keywords)
        return
    expected = loss_fn(first(x, **keywords), targets).item()
    assert pipe.step(x, targets, **keywords).loss == pytest.approx(expected, rel=1e-12)
