"""A piece of one row that only the sizer chose: torch's normalisations refuse it, and the batch has no such error."""

import pytest
import torch

import brimful

ROWS = 8


class Short(torch.nn.Module):
    """Runs out of memory with more rows than `fits`."""

    def __init__(self, norm, fits):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.fits = torch.nn.Linear(4, 4), norm, fits
        self.rows = []

    def forward(self, x):
        self.rows.append(len(x))
        y = self.norm(self.first(x))
        if len(x) > self.fits:
            raise torch.OutOfMemoryError("planted")
        return y


NORMS = {
    "BatchNorm1d": lambda: torch.nn.BatchNorm1d(4),
    "GroupNorm": lambda: torch.nn.GroupNorm(4, 4),
}


def loss_fn(model, piece):
    return model(piece).square().mean()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("ladder", ["auto", "split"])
def test_pieces_of_one_row_are_given_up_for_pieces_of_two(norm, ladder):
    model = Short(NORMS[norm](), fits=0)
    with pytest.raises(brimful.BatchTooLarge, match="planted"):
        brimful.BatchSizer(model, ladder=ladder).step(torch.randn(ROWS, 4), loss_fn)
    assert 1 in model.rows and set(model.rows[model.rows.index(1) + 1 :]) == {2}


def test_a_later_step_knows_that_pieces_have_two_rows():
    model = Short(torch.nn.BatchNorm1d(4), fits=2)
    tried = []

    def fails(model, piece):
        tried.append(len(piece))
        if len(tried) in (1, 2, 3):  # two rows too, once
            raise torch.OutOfMemoryError("planted")
        return loss_fn(model, piece)

    sizer = brimful.BatchSizer(model, ladder="split")
    outcome = sizer.step(torch.randn(ROWS, 4), fails)
    assert tried[:4] == [8, 4, 2, 1] and outcome.split == [2] * 4
    model.zero_grad()
    model.fits = 3
    assert 1 not in sizer.step(torch.randn(7, 4), loss_fn).split


def test_an_error_of_the_batch_itself_is_the_programs():
    model = torch.nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        brimful.BatchSizer(model).step(torch.randn(1, 4), loss_fn)
    with pytest.raises(ValueError, match="more than 1 value per channel"):  # as was asked for
        brimful.BatchSizer(model, pieces=8).step(torch.randn(8, 4), loss_fn)


@pytest.mark.parametrize("ladder", ["auto", "split"])
@pytest.mark.parametrize("predict", [True, False])
def test_a_split_fn_that_runs_out_of_memory_is_a_batch_that_does_not_fit(ladder, predict, no_limit):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())

    def rows(batch, begin, end):
        return batch[torch.arange(begin, end)]

    sizer = brimful.BatchSizer(model, size_fn=len, split_fn=rows, ladder=ladder, predict=predict)
    batch = torch.randn(ROWS, 16)
    others = torch.ones(1 << 16)  # for a limit that parameters and gradients are below
    brimful.memory.set_limit("cpu", brimful.memory.stats("cpu").used_bytes + 40)
    with pytest.raises(brimful.BatchTooLarge):
        sizer.step(batch, loss_fn)
    del others
