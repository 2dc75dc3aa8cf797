"""Two towers, a temperature and losses over pairs of rows, as contrastive programs have them."""

import torch
import torch.nn.functional as F


class TwoTowers(torch.nn.Module):
    """`tied`: both towers end in the same layer."""

    def __init__(self, dtype=torch.float64, dropout=0.0, tied=False, norm=False):
        super().__init__()
        torch.manual_seed(0)

        def tower(inputs):
            layers = [torch.nn.Linear(inputs, 16), torch.nn.Tanh()]
            layers += [torch.nn.BatchNorm1d(16)] if norm else []
            return torch.nn.Sequential(*layers, torch.nn.Dropout(dropout), torch.nn.Linear(16, 8))

        self.image, self.text = tower(6), tower(4)
        if tied:
            self.text[-1] = self.image[-1]
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.to(dtype)

    def forward(self, piece):
        image, text = piece
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)


def pairs(rows, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, n, generator=generator, dtype=dtype) for n in (6, 4))


def embed(model, piece):
    return model(piece)


def clip_loss(model):
    """Over all rows, of which each is the other's only match."""

    def loss(embeddings):
        image, text = embeddings
        scores = image @ text.T * model.scale.exp()
        matches = torch.arange(len(scores))
        return (F.cross_entropy(scores, matches) + F.cross_entropy(scores.T, matches)) / 2

    return loss


def own_clip_loss(model):
    """The same for a rank's own rows."""

    def loss(embeddings, rows):
        image, text = embeddings
        matches = torch.arange(rows.start, rows.stop)
        scale = model.scale.exp()
        one = F.cross_entropy(image[rows] @ text.T * scale, matches)
        return (one + F.cross_entropy(text[rows] @ image.T * scale, matches)) / 2

    return loss


def unsplit(model, batch):
    """Loss and gradients of the batch in one piece."""
    model.zero_grad()
    loss = clip_loss(model)(model(batch))
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    return loss.item(), gradients


def off(gradients, reference):
    """The largest relative difference of norms."""
    return max(
        ((a.double() - b.double()).norm() / (b.double().norm() + 1e-30)).item()
        for a, b in zip(gradients, reference, strict=True)
    )


def gradients_of(model):
    return [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]


def equal(one, other):
    """To the bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
