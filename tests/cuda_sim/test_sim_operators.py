"""Stand-ins of operators beyond what the sweep compares: views, out=, random numbers, training."""

import pytest
import torch
from simulation import program, set_delay
from torch import nn


def test_out_and_views_and_masks():
    x = torch.randn(4, 6, device="cuda")
    out = torch.empty(0, device="cuda")
    torch.mm(x, x.t(), out=out)
    torch.testing.assert_close(out.cpu(), x.cpu() @ x.cpu().t())
    x[1:3].add_(1).mul_(2)
    x.t()[0] = 5
    x[x > 4] = 0
    assert x[:, 0].abs().sum().item() == 0
    values, indices = x.topk(2)
    assert values.device.type == indices.device.type == "cuda"
    assert x.half().float().long().sum().item() == x.cpu().half().long().sum().item()
    assert x.nonzero().is_cuda


def draws():
    ones = torch.ones(64, device="cuda")
    rand, randn = torch.rand(4, device="cuda"), torch.randn(4, device="cuda")
    return [rand, randn, torch.dropout(ones, 0.5, True)]


def test_random_numbers_follow_from_the_device_s_generator():
    torch.cuda.manual_seed(3)
    state, host = torch.cuda.get_rng_state(), torch.get_rng_state()
    first, second = draws(), draws()
    assert not torch.equal(first[0], second[0])
    assert torch.equal(host, torch.get_rng_state())
    torch.cuda.set_rng_state(state)
    assert all(torch.equal(a, b) for a, b in zip(first, draws(), strict=True))
    everyone = torch.arange(50, device="cuda")
    assert torch.randperm(50, device="cuda").sort().values.equal(everyone)


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.GroupNorm(4, 16),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(100, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 100)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


def train(model, x, y, device, dtype, fused):
    model, x, y = model.to(device), x.to(device), y.to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, fused=fused)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    for _ in range(10):
        with torch.autocast(device, dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return loss.item()


# Of a half type torch's lists for autocast differ between devices.
@pytest.mark.parametrize(
    "dtype, fused, tolerance",
    [
        (None, False, 1e-4),
        (None, True, 1e-4),
        (torch.bfloat16, False, 0.1),
        (torch.half, False, 0.1),
    ],
)
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_training_gives_the_loss_of_the_cpu(name, dtype, fused, tolerance):
    torch.manual_seed(1)
    make, x, y = {
        "cnn": (cnn, torch.randn(16, 3, 16, 16), torch.randint(10, (16,))),
        "transformer": (Transformer, *torch.randint(100, (2, 8, 16))),
    }[name]
    cpu, cuda = (train(make(), x, y, device, dtype, fused) for device in ("cpu", "cuda"))
    assert cuda == pytest.approx(cpu, abs=tolerance)


# A kernel without a stand-in: cuDNN has no CPU kernel.
NO_STAND_IN = """
import torch
torch._fused_dropout(torch.ones(4, device="cuda"), 0.5)
print("went on")
"""


def test_a_kernel_without_a_stand_in_ends_a_strict_process():
    status, said = program(NO_STAND_IN, SIM_CUDA_STRICT="1")
    assert status != 0
    assert "a kernel without a CPU stand-in: " in said
    assert "fused_dropout" in said
    status, said = program(NO_STAND_IN, SIM_CUDA_STRICT="0")
    assert status == 0
    assert "kernel not run: " in said


def recurrent(kind, dtype, device):
    torch.manual_seed(0)
    model = kind(6, 5, num_layers=2, batch_first=True).to(device, dtype)
    x = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    x.requires_grad_()
    out, state = model(x)
    total = out.pow(2).sum() + sum(
        s.sum() for s in (state if isinstance(state, tuple) else [state])
    )
    return out, *torch.autograd.grad(total, [x, *model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_give_what_they_give_on_the_cpu(kind, dtype):
    """Whose cells CUDA fuses, and of which the CPU has no kernels."""
    tolerance = {} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.3}
    expected = recurrent(kind, dtype, "cpu")
    for theirs, ours in zip(expected, recurrent(kind, dtype, "cuda"), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, **tolerance)


def test_products_may_be_wider_than_what_is_multiplied():
    a, b = torch.randn(2, 3, 4).bfloat16(), torch.randn(2, 4, 5).bfloat16()
    found = torch.bmm(a.cuda(), b.cuda(), out_dtype=torch.float32)
    torch.testing.assert_close(found.cpu(), torch.bmm(a.float(), b.float()))
    found = torch.mm(a[0].cuda(), b[0].cuda(), out_dtype=torch.float32)
    torch.testing.assert_close(found.cpu(), torch.mm(a[0].float(), b[0].float()))


@pytest.mark.parametrize("delay_us", [None, 0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_that_the_cpu_has_no_kernel_of_are_computed_in_32_bits(dtype, delay_us):
    set_delay(delay_us)
    x = torch.randn(1, 2, 4, 4, 4, dtype=dtype)
    for function in (
        lambda x: nn.functional.avg_pool3d(x, 2),
        lambda x: torch.round(x, decimals=1),
    ):
        wide, given = x.float().requires_grad_(), x.cuda().requires_grad_()
        expected, found = function(wide), function(given)
        assert found.dtype == dtype
        torch.testing.assert_close(found.cpu().float(), expected, rtol=1e-2, atol=1e-2)
        expected.sum().backward()
        found.sum().backward()
        torch.testing.assert_close(given.grad.cpu().float(), wide.grad, rtol=1e-2, atol=1e-2)
