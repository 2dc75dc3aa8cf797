"""What a pipeline says of its steps: pictures, traces, bytes."""

import threading
import xml.etree.ElementTree as ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from brimful import Pipeline, Schedule
from brimful.pipeline import split_sequential

pytestmark = pytest.mark.usefixtures("no_limit")
FLOAT = 4


def layers(count, width=32):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def texts_of(svg):
    root = ElementTree.fromstring(svg)
    return [element.text for element in root.iter() if element.tag.endswith("}text")], root


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_picture_shows_measured_above_planned(schedule):
    pipe = Pipeline(
        split_sequential(layers(3), [1, 1, 1]),
        schedule=schedule,
        microbatches=4,
        loss_fn=F.mse_loss,
    )
    assert pipe.trace_svg() == ""
    x = torch.randn(16, 32)
    pipe.step(x, x)
    texts, root = texts_of(pipe.trace_svg())
    titles = [text for text in texts if schedule in text]
    assert [title.split(":")[0] for title in titles] == ["measured, in ms", "planned, in ms"]
    assert all("bubble" in title for title in titles)
    assert texts.count("rank 0") == texts.count("rank 2") == 2
    tips = [e.text for e in root.iter() if e.tag.endswith("}title")]
    kinds = "FIW" if schedule == "zb_h1" else "FB"
    for stage in range(3):
        for kind in kinds:
            for microbatch in range(4):
                name = f"{stage}{kind}{microbatch}: "
                assert sum(tip.startswith(name) for tip in tips) == 2
    rows = []
    for panel in (e for e in root if e.tag.endswith("}g")):
        top = float(panel.get("transform").removesuffix(")").split()[1])
        rows += sorted(
            {top + float(e.get("y")) for e in panel if len(e) and e.tag.endswith("}rect")}
        )
    assert len(set(rows)) == 6 and rows == sorted(rows)  # of three ranks, twice


def test_without_a_trace_there_is_no_picture():
    pipe = Pipeline(
        split_sequential(layers(2), [1, 1]), microbatches=2, loss_fn=F.mse_loss, trace=False
    )
    x = torch.randn(8, 32)
    outcome = pipe.step(x, x)
    assert pipe.trace_svg() == "" and pipe.trace() == ""
    assert [stage.peak_live_bytes for stage in outcome.stages] == [0, 0]
    assert [stage.peak_live for stage in outcome.stages] == [2, 1]


def test_another_thread_sees_what_a_step_does_and_may_not_step():
    inside, go_on = threading.Event(), threading.Event()
    model = layers(2)

    def first(x):
        if not go_on.is_set():
            inside.set()
            assert go_on.wait(20)
        return model[0](x)

    pipe = Pipeline([first, model[1]], microbatches=2, loss_fn=F.mse_loss)
    x = torch.randn(8, 32)
    assert pipe.progress() == "no call is under way"
    stepping = threading.Thread(target=pipe.step, args=(x, x))
    stepping.start()
    try:
        assert inside.wait(20)
        while "rank 1: action 1 of 4, 1F0 (forward of microbatch 0 in stage 1), waits" not in (
            text := pipe.progress()
        ):
            assert stepping.is_alive()
        assert text.startswith("a step: its actions\n  rank 0: action 1 of 4, 0F0 (forward of")
        assert "now: a step: its actions" in repr(pipe)
        for call in (lambda: pipe.step(x, x), lambda: pipe.forward(x)):
            with pytest.raises(ValueError, match="another thread is in a call of this pipeline"):
                call()
    finally:
        go_on.set()
        stepping.join(20)
    assert pipe.progress() == "no call is under way"
    assert "last step" in repr(pipe)


def test_bytes_of_parameters_gradients_and_buffers():
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 8, bias=False))
    model[2].weight.requires_grad_(False)
    pipe = Pipeline(
        split_sequential(model, [2, 1]), microbatches=2, loss_fn=F.mse_loss, batch_norm="rescale"
    )
    first, second = pipe.step(torch.randn(8, 32), torch.randn(8, 8)).stages
    assert first.parameter_bytes == first.gradient_bytes == (32 * 32 + 32 + 2 * 32) * FLOAT
    assert first.buffer_bytes == 2 * 32 * FLOAT + 8
    assert second.parameter_bytes == 32 * 8 * FLOAT
    assert second.gradient_bytes == second.buffer_bytes == 0
    text = repr(pipe)
    assert "buffers 264 B" in text and "gradients 0 B" in text


class Keeps(nn.Module):
    """Holds a tensor of known size for its backward, and one that is its output."""

    def forward(self, x):
        return x.exp()  # saves its result alone


@pytest.mark.parametrize(
    "schedule, held", [("gpipe", [6, 6, 6]), ("1f1b", [3, 2, 1]), ("zb_h1", [3, 3, 3])]
)
def test_bytes_held_are_those_of_the_microbatches_held(schedule, held):
    torch.manual_seed(0)
    rows, width = 8, 64
    weight = nn.Parameter(torch.ones(width))

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return x * self.weight

    pipe = Pipeline(
        [First(), Keeps(), Keeps()],
        schedule=schedule,
        microbatches=6,
        loss_fn=lambda o, t: o.sum() / len(o),
    )
    x = torch.zeros(6 * rows, width)
    pipe.step(x, x)
    stages = pipe.step(x, x).stages
    piece = rows * width * FLOAT
    assert [stage.peak_live for stage in stages] == held
    most = [stage.peak_live * piece for stage in stages]
    assert stages[0].peak_live_bytes == most[0]
    if schedule == "zb_h1":  # what I has freed is not there any more when the next F comes
        assert piece < stages[1].peak_live_bytes < most[1]
    else:
        assert stages[1].peak_live_bytes == most[1]
        # The last one has the loss too, some bytes.
        assert 0 < stages[2].peak_live_bytes - most[2] < 100 * stages[2].peak_live


def test_a_plan_for_receives_in_another_order_is_drawn():
    lines = [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1",
    ]
    order = Schedule.from_csv("\n".join(lines), "late")
    assert not order.check() and order.check(channels="by_message")
    pipe = Pipeline(split_sequential(layers(2), [1, 1]), schedule=order, loss_fn=F.mse_loss)
    x = torch.randn(8, 32)
    assert pipe.step(x, x).pieces == 2
    assert "late" in pipe.trace_svg() and "1F0" in pipe.trace()
