"""The gradient is the weighted mean over all samples of all ranks, however they are cut into pieces."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from models import classes, cross_entropy, gradients_of, relative_difference, wrap

import brimful

PRECISION = {torch.float32: 1e-6, torch.float64: 1e-12}
IGNORED = -100


def net(dtype=torch.float32):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3)).to(
        dtype
    )


def exact(module, loss_fn, batches):
    """Gradients and mean loss of one process in float64, over [(weight, batch)]."""
    reference = copy.deepcopy(module).double()
    total = sum(weight for weight, _ in batches)
    loss = sum(loss_fn(reference, batch) * weight for weight, batch in batches) / total
    loss.backward()
    return gradients_of(reference), loss.item()


def in_double(batch):
    return tuple(t.double() if t.is_floating_point() else t for t in batch)


def splits_of(rows):
    return [None, [rows], [1] * rows, [rows - 1, 1], [1, rows - 1]]


def rows_job(rank, dtype):
    module = net(dtype)
    model = wrap(copy.deepcopy(module))
    rows = [7, 4, 5]
    batches = [classes(rows[r], seed=r, dtype=dtype) for r in range(rank.size)]
    expected, loss = exact(module, cross_entropy, [(len(b[1]), in_double(b)) for b in batches])
    worst = 0.0
    mine = batches[rank.index]
    for number in range(5):
        sizer = brimful.BatchSizer(model)
        for _ in range(2):  # the second step divides by the total of the first
            outcome = sizer.step(mine, cross_entropy, split=splits_of(len(mine[1]))[number])
            assert outcome.weight == sum(rows[: rank.size])
            assert abs(outcome.loss - loss) <= PRECISION[dtype] * abs(loss)
            worst = max(worst, relative_difference(gradients_of(model), expected))
            model.zero_grad()
    return worst


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", PRECISION)
def test_uneven_batches_and_pieces_give_the_mean_over_all_samples(ranks, dtype, size):
    assert max(ranks(rows_job, dtype, size=size)) <= PRECISION[dtype]


class Tagger(torch.nn.Module):
    """Scores for each token of a sequence."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embedding = torch.nn.Embedding(11, 8)
        self.scores = torch.nn.Linear(8, 5)

    def forward(self, tokens):
        return self.scores(torch.tanh(self.embedding(tokens)))


def sentences(rows, seed, keep=0.6):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (rows, 9), generator=generator)
    labels = torch.randint(0, 5, (rows, 9), generator=generator)
    labels[torch.rand(rows, 9, generator=generator) >= keep] = IGNORED
    return tokens, labels


def count_tokens(batch):
    return int((batch[1] != IGNORED).sum())


def token_loss(model, piece):
    scores = model(piece[0])
    loss = F.cross_entropy(scores.flatten(0, 1), piece[1].flatten(), ignore_index=IGNORED)
    return loss, count_tokens(piece)


def mean_token_loss(model, piece):
    return token_loss(model, piece)[0]


def tokens_job(rank, dtype, known, kinds):
    """`kinds`: by rank, the share of tokens that count, in each of its batches; None for no data."""
    module = Tagger().to(dtype)
    model = wrap(copy.deepcopy(module))
    sizer = brimful.BatchSizer(model, weight_fn=count_tokens if known else None)
    worst = 0.0
    for step, pieces in itertools.product(range(2), [1, 2, 6]):
        batches = [
            None if keep is None else sentences(6 + r, 10 * step + r, keep)
            for r, keep in enumerate(kinds)
        ]
        if batches[0] is not None:
            batches[0][1][:2] = IGNORED  # a piece of weight 0
        full = [(count_tokens(b), b) for b in batches if b is not None and count_tokens(b) > 0]
        mine = batches[rank.index]
        split = None
        if mine is not None:
            rows = len(mine[0])
            split = [rows] if pieces == 1 else [2, rows - 2] if pieces == 2 else [1] * rows
        outcome = sizer.step(brimful.NO_DATA if mine is None else mine, token_loss, split=split)
        assert outcome.weight == sum(weight for weight, _ in full)
        if full:
            expected, loss = exact(module, mean_token_loss, full)
            assert abs(outcome.loss - loss) <= PRECISION[dtype] * abs(loss)
            worst = max(worst, relative_difference(gradients_of(model), expected))
        else:
            assert outcome.loss == 0
            for gradient in gradients_of(model).values():
                assert gradient is not None and torch.count_nonzero(gradient) == 0
        model.zero_grad()
    return worst


@pytest.mark.parametrize("dtype", PRECISION)
def test_a_loss_over_tokens_is_weighted_by_its_tokens(ranks, dtype):
    def worst(known, kinds):
        return max(ranks(tokens_job, dtype, known, kinds, size=len(kinds)))

    limit = PRECISION[dtype]
    assert worst(False, [0.6, 0.2]) <= limit
    assert worst(True, [0.6, 0.2]) <= limit
    assert worst(False, [0.9, 0.0, 0.3]) <= limit  # rank 1 has weight 0
    assert worst(True, [0.0, 0.3]) <= limit  # rank 0 has
    assert worst(False, [None, 0.3]) <= limit  # rank 0 has no data
    assert worst(False, [None, None]) == 0


CLASS_WEIGHTS = torch.tensor([0.2, 3.0, 1.1], dtype=torch.float64)


def class_weight(batch):
    return float(CLASS_WEIGHTS[batch[1]].sum())


def weighted_loss(model, piece):
    """As torch's CrossEntropyLoss(weight=...): a mean over the weights of the targets' classes."""
    scores = model(piece[0])
    loss = F.cross_entropy(scores, piece[1], weight=CLASS_WEIGHTS.to(scores.dtype))
    return loss, class_weight(piece)


def class_weights_job(rank, dtype, known):
    module = net(dtype)
    model = wrap(copy.deepcopy(module))
    sizer = brimful.BatchSizer(model, weight_fn=class_weight if known else None)
    batches = [classes(6 + r, seed=r, dtype=dtype) for r in range(rank.size)]
    whole = tuple(torch.cat(parts) for parts in zip(*map(in_double, batches), strict=True))
    reference = copy.deepcopy(module).double()
    loss = torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)(reference(whole[0]), whole[1])
    loss.backward()
    worst = 0.0
    mine = batches[rank.index]
    for split in splits_of(len(mine[1])):
        outcome = sizer.step(mine, weighted_loss, split=split)
        assert abs(outcome.weight - class_weight(whole)) <= 1e-6 * outcome.weight
        assert abs(outcome.loss - loss.item()) <= PRECISION[dtype] * loss.item()
        worst = max(worst, relative_difference(gradients_of(model), gradients_of(reference)))
        model.zero_grad()
    return worst


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("dtype", PRECISION)
def test_class_weights_give_the_mean_of_torchs_weighted_loss(ranks, dtype, known, size):
    assert max(ranks(class_weights_job, dtype, known, size=size)) <= PRECISION[dtype]


class Sometimes(torch.nn.Module):
    """Uses a layer only for the rows that are marked."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.base = torch.nn.Linear(6, 3)
        self.extra = torch.nn.Linear(6, 3)
        self.never = torch.nn.Linear(6, 3)

    def forward(self, x):
        out = self.base(x)
        marked = x[:, 0] > 0
        if marked.any():
            out = out + torch.where(marked[:, None], self.extra(x), 0.0)
        return out


def sometimes_job(rank, marked_rank, marked_row):
    module = Sometimes()
    model = wrap(copy.deepcopy(module))
    batches = [classes(6, seed=r) for r in range(rank.size)]
    for r, (x, _) in enumerate(batches):
        x[:, 0] = -1
        if r == marked_rank:
            x[marked_row, 0] = 1
    expected, _ = exact(module, cross_entropy, [(6, in_double(b)) for b in batches])
    sizer = brimful.BatchSizer(model)
    found = []
    for split in ([2, 4], [6], [1] * 6):
        sizer.step(batches[rank.index], cross_entropy, split=split)
        gradients = gradients_of(model)
        assert gradients.pop("never.weight") is None and gradients.pop("never.bias") is None
        used = {name: value for name, value in expected.items() if not name.startswith("never")}
        found.append(relative_difference(gradients, used))
        model.zero_grad()
    return max(found)


def test_a_parameter_used_in_one_piece_of_one_rank_gets_the_mean(ranks):
    for marked_rank, marked_row in ((0, 0), (1, 1), (1, 5)):
        assert max(ranks(sometimes_job, marked_rank, marked_row)) <= 1e-6


class Mixed(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(6)
        self.first = torch.nn.Linear(6, 12)
        self.middle = torch.nn.Linear(12, 12).to(dtype)
        self.last = torch.nn.Linear(12, 3)

    def forward(self, x):
        x = self.middle(torch.tanh(self.first(x)).to(self.middle.weight.dtype))
        return self.last(x.to(self.last.weight.dtype))


def mixed_job(rank, dtype):
    module = Mixed(dtype)
    model = wrap(copy.deepcopy(module))
    batches = [classes(5 + 3 * r, seed=r) for r in range(rank.size)]
    expected, loss = exact(module, cross_entropy, [(len(b[1]), in_double(b)) for b in batches])
    sizer = brimful.BatchSizer(model)
    mine = batches[rank.index]
    found = {}
    for split in splits_of(len(mine[1])):
        outcome = sizer.step(mine, cross_entropy, split=split)
        assert outcome.weight == 13 and abs(outcome.loss - loss) < 0.02
        gradients = gradients_of(model)
        assert gradients["middle.weight"].dtype == dtype
        for name, value in gradients.items():
            difference = relative_difference({name: value}, {name: expected[name]})
            found[name] = max(found.get(name, 0), difference)
        model.zero_grad()
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_beside_float32_is_as_exact_as_its_format(ranks, dtype):
    for found in ranks(mixed_job, dtype):
        assert max(found.values()) < 40 * torch.finfo(dtype).eps
        assert found["last.bias"] < 10 * torch.finfo(dtype).eps


def whole_half_job(rank, dtype):
    """All parameters are of half precision, so is the bucket that carries the control record."""
    model = wrap(net(dtype))
    sizer = brimful.BatchSizer(model)
    rows = 300 + rank.index  # its bytes must arrive unharmed
    x, y = classes(rows, seed=rank.index)
    outcome = sizer.step((x.to(dtype), y), cross_entropy, split=[rows - 1, 1])
    return outcome.weight, outcome.loss


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weight_and_loss_arrive_exactly_in_half_precision(ranks, dtype):
    first, second = ranks(whole_half_job, dtype)
    assert first == second
    assert first[0] == 601
    assert 0.5 < first[1] < 2


def test_one_process_in_pieces_gives_the_mean_of_the_whole_batch():
    module = net()
    batch = classes(7)
    expected, loss = exact(module, cross_entropy, [(7, in_double(batch))])
    sizer = brimful.BatchSizer(module)
    for split in splits_of(7):
        outcome = sizer.step(batch, cross_entropy, split=split)
        assert abs(outcome.loss - loss) < 1e-6 and outcome.weight == 7
        assert relative_difference(gradients_of(module), expected) <= 1e-6
        module.zero_grad()
