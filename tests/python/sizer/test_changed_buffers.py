"""What a forward may change of a module's buffers, wherever a forward is repeated, undone or only tried."""

import functools

import pytest
import torch
from models import recomputed_stages, used
from torch import nn

import brimful

ROWS, WIDTH = 8, 16


def in_place(module, rows):
    module.seen += rows


def anew(module, rows):
    module.seen = module.seen + rows


def resized(module, rows):
    if module.seen.shape != (4,):
        module.seen.resize_(4).fill_(0)
    module.seen += rows


def shrunk(module, rows):
    module.seen = module.seen + rows
    module.width.resize_(3 - module.width.numel()).fill_(1)


def late(module, rows):
    if "seen" not in module._buffers:
        module.register_buffer("seen", torch.zeros(()))
    module.seen += rows


def late_anew(module, rows):
    before = getattr(module, "seen", 0)
    module.register_buffer("seen", torch.as_tensor(float(before + rows)))


def none_first(module, rows):
    module.seen = torch.tensor(float(rows)) if module.seen is None else module.seen + rows


def none_then_in_place(module, rows):
    if module.seen is None:
        module.seen = torch.zeros(())
    module.seen += rows


def taken_away(module, rows):
    seen = module.seen
    del module.seen
    module.register_buffer("seen", seen + rows)


def another_dtype(module, rows):
    seen = module.seen.double() + rows
    module.seen.data = seen


#: Each with what the buffer is at first; `...` where there is none of that name.
FORMS = {
    in_place: torch.zeros(()),
    anew: torch.zeros(()),
    resized: torch.zeros(1),
    shrunk: torch.zeros(()),
    late: ...,
    late_anew: ...,
    none_first: None,
    none_then_in_place: None,
    taken_away: torch.zeros(()),
    another_dtype: torch.zeros(()),
}
forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)


class Counting(nn.Module):
    """Counts the rows that have come through it in a buffer."""

    def __init__(self, form, dropout=0.0):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.form, self.dropout = [form], dropout
        self.register_buffer("width", torch.ones(1))
        if (first := FORMS[form]) is not ...:
            self.register_buffer("seen", None if first is None else first.clone())

    def forward(self, x):
        with torch.no_grad():
            self.form[0](self, len(x))
        return nn.functional.dropout(self.inner(x).sin().exp().tanh(), self.dropout) + x


def rows_seen(module):
    """The same in all elements."""
    (seen,) = set(module.seen.reshape(-1).tolist())
    return seen


def state_of(module):
    """Names, tensors, sizes and values."""
    return {
        name: (id(buffer), None if buffer is None else (buffer.dtype, buffer.tolist()))
        for name, buffer in module._buffers.items()
    }


def square(model, x):
    return model(x).square().mean()


class RunsOut:
    """A loss whose first `times` calls run out of memory behind the forward."""

    def __init__(self, times, error=torch.OutOfMemoryError):
        self.times, self.error = times, error

    def __call__(self, model, x):
        loss = square(model, x)
        if self.times > 0:
            self.times -= 1
            raise self.error("CUDA out of memory. Planted")
        return loss


def single(form):
    model = Counting(form)
    return model, brimful.BatchSizer(model, torch.optim.SGD(model.parameters(), 0.1))


@forms
def test_a_sizers_retry_counts_once(form):
    model, sizer = single(form)
    loss, steps = RunsOut(2), 3
    for _ in range(steps):
        sizer.step(torch.randn(ROWS, WIDTH), loss)
        model.zero_grad()
    assert loss.times == 0 and rows_seen(model) == steps * ROWS


@forms
@pytest.mark.parametrize("after", [0, 1])
def test_a_sizers_step_that_fails_counts_nothing(form, after):
    model, sizer = single(form)
    for _ in range(after):
        sizer.step(torch.randn(ROWS, WIDTH), square)
        model.zero_grad()
    before = state_of(model)
    with pytest.raises(ValueError, match=r"Planted"):
        sizer.step(torch.randn(ROWS, WIDTH), RunsOut(1, ValueError))
    assert state_of(model) == before


@forms
def test_a_rehearsal_and_a_summary_and_a_verification_count_nothing(form):
    model, sizer = single(form)
    before = state_of(model)
    x = torch.randn(ROWS, WIDTH)
    sizer.plan(x, square)
    assert state_of(model) == before
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    brimful.summary(model, x, loss_fn=square, optimizer=optimizer)
    assert state_of(model) == before
    brimful.verify_split(model, x, square)
    assert state_of(model) == before


@forms
def test_a_pair_step_counts_each_row_once(form):
    """Its pieces run twice: without a graph, and with one."""
    model, sizer = single(form)
    for _ in range(2):
        sizer.pair_step(
            torch.randn(ROWS, WIDTH), lambda model, piece: model(piece), lambda h: (h @ h.T).mean()
        )
        model.zero_grad()
    assert rows_seen(model) == 2 * ROWS


@forms
def test_the_ladder_counts_once(form):
    """One row, whose modules run again in backward."""
    model = nn.Sequential(*(Counting(form) for _ in range(6)))
    sizer = brimful.BatchSizer(
        model, torch.optim.SGD(model.parameters(), 0.1), ladder=["split", "recompute"]
    )
    x, rungs = torch.randn(1, 3000, WIDTH), []
    try:
        for _ in range(6):
            brimful.memory.set_limit("cpu", used() + 3_300_000)
            rungs.append(bool(sizer.step(x, square).rungs.recomputed))
            model.zero_grad()
    finally:
        brimful.memory.set_limit("cpu", None)
    assert sum(rungs) >= 4, "modules are recomputed"
    assert [rows_seen(block) for block in model] == [6] * 6


def mean_square(output, target):
    return (output - target).square().mean()


def pipeline_of(stages, loss_fn=mean_square, **options):
    return brimful.Pipeline(
        stages, devices=["cpu"] * len(stages), microbatches=4, loss_fn=loss_fn, **options
    )


#: Options, dropout, and how often a shortage comes.
PIPELINES = {
    "plain": ({}, 0.0, 0),
    "draws": ({}, 0.1, 0),
    "recomputed": ({"recompute": "all"}, 0.0, 0),
    "recomputed and draws": ({"recompute": "all"}, 0.1, 0),
    "one recomputed": ({"recompute": (0,)}, 0.0, 0),
    "runs out": ({}, 0.0, 1),
    "runs out and recomputed": ({"recompute": "all"}, 0.0, 1),
}


@forms
@pytest.mark.parametrize("case", PIPELINES)
def test_a_pipeline_counts_once(case, form):
    options, dropout, times = PIPELINES[case]
    stages = [Counting(form, dropout), Counting(form, dropout)]
    loss = RunsOut(times)
    pipe = pipeline_of(stages, lambda output, _: loss(lambda x: x, output), **options)
    x = torch.randn(ROWS, WIDTH)
    for step in range(1, 4):
        outcome = pipe.step(x)
        assert outcome.retries == (step == 1 and (times > 0 or dropout > 0))
        assert [rows_seen(stage) for stage in stages] == [step * ROWS] * 2
    pipe.forward(x)
    assert [rows_seen(stage) for stage in stages] == [4 * ROWS] * 2
    assert (
        len(recomputed_stages(outcome)) == {"all": 2, (): 0, (0,): 1}[options.get("recompute", ())]
    )


@forms
@pytest.mark.parametrize("recompute", [(), "all"])
def test_a_pipelines_step_that_fails_counts_nothing(form, recompute):
    stages = [Counting(form), Counting(form)]
    loss = RunsOut(0, ValueError)
    pipe = pipeline_of(
        stages, lambda output, _: loss(lambda x: x, output), recompute=recompute, max_retries=0
    )
    x = torch.randn(ROWS, WIDTH)
    for _ in range(2):
        before = [state_of(stage) for stage in stages]
        loss.times = 1
        with pytest.raises(ValueError, match=r"Planted"):
            pipe.step(x)
        assert [state_of(stage) for stage in stages] == before
        loss.times = 0
        pipe.step(x)


class Criterion(nn.Module):
    """A loss with a buffer that it assigns anew."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, output, target):
        self.seen = self.seen + len(output)
        return mean_square(output, target)


@pytest.mark.parametrize("recompute", [(), "all"])
def test_a_pipelines_loss_counts_once(recompute):
    criterion = Criterion()
    pipe = pipeline_of([Counting(anew, 0.1), Counting(anew, 0.1)], criterion, recompute=recompute)
    for _ in range(2):
        pipe.step(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    assert rows_seen(criterion) == 2 * ROWS


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.size(0)
        return torch.dropout(self.inner(x), 0.1, True)


@pytest.mark.parametrize("recompute", [(), "all"])
def test_a_scripted_stage_counts_once(recompute):
    stages = [torch.jit.script(Scripted()), torch.jit.script(Scripted())]
    pipe = pipeline_of(stages, recompute=recompute)
    for _ in range(2):
        pipe.step(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    assert [rows_seen(stage) for stage in stages] == [2 * ROWS] * 2


@forms
def test_inference_without_versions_counts_too(form):
    """Buffers that were assigned in inference mode are part of a later step."""
    stages = [Counting(form, 0.1), Counting(form, 0.1)]
    pipe = pipeline_of(stages)
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    with torch.inference_mode():
        pipe.forward(x)
    if form in (in_place, resized, late, none_then_in_place, shrunk, another_dtype):
        return  # what is made in inference mode is not changed in place outside
    pipe.step(x, y)
    with torch.inference_mode():
        pipe.forward(x)
    assert [rows_seen(stage) for stage in stages] == [3 * ROWS] * 2


@pytest.fixture
def forgotten():
    brimful._C._forget_map_sizes()


class Predicting:
    def __init__(self, form):
        self.model, self.loss = Counting(form), RunsOut(3)

    def predict(self, x):
        self.loss(self.model, x)  # its first calls run out behind the forward
        return x


def bound(job):
    return job.predict


def closing_over(job):
    model, loss = job.model, job.loss

    def predict(x):
        loss(model, x)
        return x

    return predict


def partly(job):
    return functools.partial(
        lambda model, loss, x: loss(model, x)[None].expand(len(x)), job.model, job.loss
    )


@forms
@pytest.mark.parametrize("way", [bound, closing_over, partly], ids=lambda way: way.__name__)
def test_what_is_mapped_counts_each_row_once(forgotten, form, way):
    job = Predicting(form)
    brimful.map_batches(way(job), torch.randn(ROWS, WIDTH))
    assert job.loss.times == 0 and rows_seen(job.model) == ROWS


named = None


def by_name(x):
    return named.predict(x)


def test_what_a_function_names_is_counted_once_too(forgotten, monkeypatch):
    job = Predicting(in_place)
    monkeypatch.setitem(globals(), "named", job)
    brimful.map_batches(by_name, torch.randn(ROWS, WIDTH))
    assert job.loss.times == 0 and rows_seen(job.model) == ROWS
