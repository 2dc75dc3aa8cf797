"""What is known of the values of a device without arithmetic, and what a read of others gets."""

import json
import re

import pytest
from simulation import without_arithmetic

# Each line is run on the host and on the device, and says the same on both.
KNOWN = """
ids.tolist()
ids.sum().item()
ids[ids != 0].tolist()
torch.masked_select(ids, ids > 1).tolist()
torch.nonzero(ids).tolist()
torch.where(ids > 2)[0].tolist()
torch.where(ids > 2, ids, -100).tolist()
torch.unique(ids, return_inverse=True, return_counts=True)[2].tolist()
torch.unique(ids, dim=0).tolist()
torch.unique(ids, dim=1).shape
torch.unique_consecutive(torch.tensor([1, 1, 2, 3, 3], device=device)).tolist()
torch.bincount(ids.flatten()).tolist()
torch.nn.functional.one_hot(ids).shape
torch.equal(ids, ids.clone()), torch.equal(ids, ids + 1)
torch.arange(7, device=device).tolist(), torch.arange(1, 9, 3, device=device).tolist()
torch.arange(3, device=device).repeat_interleave(torch.tensor([1, 2, 3], device=device)).tolist()
torch.full((2, 2), 3, device=device).tolist(), torch.ones(3, device=device).tolist()
torch.randperm(9, device=device).sort()[0].tolist()
torch.randint(4, 5, (3,), device=device).tolist()
torch.eye(3, device=device, dtype=torch.long).tolist()
torch.tril(torch.ones(3, 3, dtype=torch.bool, device=device)).tolist()
torch.argsort(ids, dim=1, stable=True).tolist(), torch.topk(ids, 2, dim=1)[0].tolist()
ids.cumsum(1).tolist(), ids.max(dim=1)[0].tolist(), ids.argmax(1).tolist()
ids.float().mean().item(), (ids != 0).float().sum(1).tolist(), ids.to(torch.int32).amin().item()
torch.tensor(2.5, device=device).mul(2).item()
torch.cat([ids, ids + 1]).T.contiguous().tolist(), torch.stack([ids, ids])[1, :, ::2].tolist()
ids.expand(2, 2, 4).sum().item(), ids.flip(1).roll(1, 0).tolist()
torch.gather(ids, 1, torch.zeros(2, 2, dtype=torch.long, device=device)).tolist()
torch.zeros(4, dtype=torch.long, device=device).scatter_add_(0, ids[0] % 4, ids[0]).tolist()
torch.searchsorted(torch.tensor([1, 3, 5], device=device), ids).tolist()
torch.isin(ids, torch.tensor([5, 7], device=device)).tolist()
torch.zeros(3, 3, device=device, dtype=torch.long).index_put_((ids[0, 1:3] % 3,), ids[0, 3]).tolist()
changed(torch.zeros(4, 4, dtype=torch.long, device=device))
torch._foreach_add([ids, ids], 1)[1].tolist()
torch.nn.utils.rnn.pad_sequence([ids[0], ids[1, :2]], batch_first=True).tolist()
[part.tolist() for part in ids.split(1)]
bool((ids == ids).all()), (ids > 100).any().item()
"""

RUN_BOTH = """
import torch
def changed(x):
    x[:, 1] = 3
    x[0] += 1
    x.view(-1)[5:7].mul_(2)
    x.t()[3].fill_(9)
    return x.tolist()
for line in {lines!r}.strip().splitlines():
    said = []
    for device in ("cpu", "cuda"):
        ids = torch.tensor([[1, 5, 0, 7], [2, 0, 0, 3]]).to(device)
        said.append(eval(line))
    if said[0] != said[1]:
        print(line, *said)
print("end")
"""


def test_what_follows_from_integers_and_constants_is_what_the_host_computes(tmp_path):
    report = tmp_path / "report"
    status, said = without_arithmetic(
        RUN_BOTH.format(lines=KNOWN), "h200", SIM_CUDA_REPORT=str(report)
    )
    assert (status, said) == (0, "end\n")
    assert json.loads(report.read_text())["unknown_reads"] == []


UNKNOWN = """
import torch
x = torch.randn(10, device="cuda")
print(x.sum().item(), x.tolist()[:2])
ones = torch.ones(2, 2, dtype=torch.long, device="cuda")
torch._foreach_mul_([ones, ones[0]], 2)
print(ones[0, 0].item())
print(len(x[x > 0]), len(torch.unique(x)), torch.nonzero(x > 0).shape[1])
print(bool(x.sum() > 1))
if x.max() > 0:
    print("never")
"""


@pytest.mark.parametrize(("word", "counts"), [("least", "0 1 1"), ("most", "10 10 1")])
def test_a_read_of_what_is_not_known_is_zeros_and_is_reported_with_its_line(tmp_path, word, counts):
    report = tmp_path / "report"
    status, said = without_arithmetic(
        UNKNOWN, "h200", SIM_CUDA_UNKNOWN=word, SIM_CUDA_REPORT=str(report)
    )
    assert status == 0, said
    lines = said.splitlines()
    assert lines[:4] == ["0.0 [0.0, 0.0]", "0", counts, "False"]
    assert f"the {word} that can be" in lines[4]
    reads = json.loads(report.read_text())["unknown_reads"]
    assert {(read["line"], read["operator"]) for read in reads} == {
        ("<string>:4", "aten::item"),
        ("<string>:4", "aten::to"),
        ("<string>:7", "aten::item"),  # in which order they were written is not said
        ("<string>:8", "aten::index"),
        ("<string>:8", "aten::_unique2"),
        ("<string>:8", "aten::nonzero"),
        ("<string>:9", "aten::is_nonzero"),
        ("<string>:10", "aten::is_nonzero"),
    }
    for read in reads:
        assert f"{read['times']} x {read['line']} ({read['operator']})" in said


DECIDED = """
import torch
hidden = torch.randn(4, device="cuda")
unknown = hidden > 0
ends, goes_on = (torch.full((4,), value, device="cuda") for value in (True, False))
rows = torch.ones(4, dtype=torch.long, device="cuda")
print((unknown | ends).tolist(), (goes_on & unknown).tolist(), unknown.logical_or(ends).all().item())
left = (rows & ~unknown) & ~(unknown | ends)
print(left.max().item() == 0, (unknown & goes_on).any().item(), (unknown.long() | -1).tolist()[0])
finished = goes_on.clone()
finished |= unknown
finished |= ends
print(finished.all().item())
if (unknown | goes_on).any() or ((unknown | (rows == torch.tensor([1, 1, 1, 2]).cuda())).all()):
    print("never")
"""


@pytest.mark.parametrize("word", ["least", "most"])
def test_what_one_side_decides_is_known_whatever_the_other_is(tmp_path, word):
    report = tmp_path / "report"
    chosen = {"SIM_CUDA_UNKNOWN": word, "SIM_CUDA_REPORT": str(report)}
    status, said = without_arithmetic(DECIDED, "h200", **chosen)
    assert status == 0, said
    assert said.splitlines()[:3] == [
        "[True, True, True, True] [False, False, False, False] True",
        "True False -1",
        "True",
    ]
    reads = json.loads(report.read_text())["unknown_reads"]
    assert {(read["line"], read["times"]) for read in reads} == {("<string>:14", 2)}


FINITE = """
import torch
x = torch.randn(4, device="cuda", requires_grad=True)
print(torch.isfinite(x).all().item(), x.isnan().any().item(), bool(torch.isinf(x.sum())))
print(torch.isposinf(x).any().item(), torch.isneginf(x).any().item(), torch.isfinite(x).tolist())
known = torch.tensor([1, 1, 0]).cuda() / torch.tensor([1, 0, 0]).cuda()
print(torch.isfinite(known).tolist(), known.isnan().tolist(), known.isinf().tolist())
x.sum().backward()
torch.nn.utils.clip_grad_norm_([x], 1.0, error_if_nonfinite=True)
"""


def test_numbers_that_are_not_known_are_taken_as_finite(tmp_path):
    report = tmp_path / "report"
    status, said = without_arithmetic(FINITE, "h200", SIM_CUDA_REPORT=str(report))
    assert (status, said.splitlines()) == (
        0,
        [
            "True False False",
            "False False [True, True, True, True]",
            "[True, False, False] [False, False, True] [False, True, False]",
        ],
    )
    assert json.loads(report.read_text())["unknown_reads"] == []


UNSEEN = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Names(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))

seen = []
x = torch.arange(4).cuda()
with Names():
    y = (x + 1) * 2
    n = y.nonzero()
print(seen, y.tolist())
try:
    x.add_(torch.ones(3, dtype=torch.long, device="cuda"))
except RuntimeError:
    print(x.tolist())
with torch.inference_mode():
    z = x * 2
    z += 1
print(z.tolist())
w = torch.zeros(3, device="cuda", requires_grad=True)
(w * torch.arange(3, device="cuda")).sum().backward()
print(w.grad.tolist())
"""


def test_the_program_sees_nothing_of_it():
    """Neither modes nor autograd; an operator that raises changes nothing."""
    status, said = without_arithmetic(UNSEEN, "h200")
    assert status == 0, said
    calls = ["aten.add.Tensor", "aten.mul.Tensor", "aten.nonzero.default"]
    assert said.splitlines() == [
        f"{calls} [2, 4, 6, 8]",
        "[0, 1, 2, 3]",
        "[1, 3, 5, 7]",
        "[0.0, 1.0, 2.0]",
    ]


LOOP = """
import torch
loss = torch.randn((), device="cuda")
steps = 0
while not loss > 0.1 and steps < 2000:
    steps += 1
"""


def test_a_loop_that_a_value_is_to_end_is_named_while_it_runs():
    status, said = without_arithmetic(LOOP, "h200")
    assert status == 0, said
    assert said.count("was read 1000 times at <string>:5 (aten::is_nonzero)") == 1


# Random programs on tensors of which some are not known, nor what is made of these; the host has the same others.
RANDOM = """
import random, torch
draw = random.Random({seed})
torch.manual_seed({seed})
CALLS = [
    lambda a, b: a + b, lambda a, b: a * 2, lambda a, b: torch.where(a > b, a, b), lambda a, b: a.flip(0),
    lambda a, b: a.cumsum(1), lambda a, b: a.clone(), lambda a, b: torch.cat([a[:2], b[2:]]),
    lambda a, b: a.t().contiguous(), lambda a, b: a.sort(1)[0], lambda a, b: (a > b).long(),
    lambda a, b: a.masked_fill(b > 3, 1), lambda a, b: a.gather(0, b.clamp(0, 3)),
]
CHANGES = [
    lambda a, b: a.add_(b), lambda a, b: a.copy_(b), lambda a, b: a[1].copy_(b[2]), lambda a, b: a[:, 1].mul_(2),
    lambda a, b: a.t()[2].add_(b[0]), lambda a, b: torch.add(a, b, out=a),
    lambda a, b: a.index_add_(0, b[0].clamp(0, 3), b),
    lambda a, b: torch._foreach_mul_([a[1:], a[0]], 2), lambda a, b: a.masked_fill_(b > 2, 0),
]
host = [torch.randint(0, 5, (4, 4)) for _ in range(6)]
device = [x.cuda() for x in host]
tainted = [False] * 6
for step in range(400):
    i, j, k = (draw.randrange(6) for _ in range(3))
    kind = draw.random()
    if kind < 0.08:
        host[i], device[i], tainted[i] = torch.zeros(4, 4).long(), torch.randn(4, 4, device="cuda").long(), True
    elif kind < 0.2:
        host[i] = torch.randint(0, 5, (4, 4))
        device[i], tainted[i] = host[i].cuda(), False
    elif kind < 0.6:
        call = draw.choice(CALLS)
        host[i], device[i] = call(host[j], host[k]), call(device[j], device[k])
        tainted[i] = tainted[j] or tainted[k]
    else:
        if i == j:
            continue
        change = draw.choice(CHANGES)
        change(host[i], host[j]), change(device[i], device[j])
        tainted[i] = tainted[i] or tainted[j]
    if not tainted[i] and host[i].tolist() != device[i].tolist():
        print("wrong", step)
print("end")
"""


@pytest.mark.parametrize("seed", range(3))
def test_in_random_programs_what_is_known_is_right_and_nothing_else_is_reported(tmp_path, seed):
    report = tmp_path / "report"
    status, said = without_arithmetic(RANDOM.format(seed=seed), "h200", SIM_CUDA_REPORT=str(report))
    assert (status, said) == (0, "end\n")
    assert json.loads(report.read_text())["unknown_reads"] == []


KEPT = """
import torch
resident = lambda: int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) >> 10
before = resident()
for rows in (1 << 20, 1 << 24):
    x = torch.zeros(rows, dtype=torch.long, device="cuda")
    x += 1
    print(x[-1].item())
tokens = [torch.ones(1 << 20, dtype=torch.long, device="cuda") for _ in range(200)]
del x, tokens
weights = [torch.empty(1 << 20, device="cuda").fill_(1) for _ in range(200)]
print(resident() - before < 300, weights[0][0].item())
"""


def test_no_more_is_kept_than_is_said():
    """Of one tensor 8 MiB, of all together 32 times as much; and floating-point numbers only where there are few."""
    status, said = without_arithmetic(KEPT, "h200", SIM_CUDA_KNOWN_MB="8")
    assert status == 0, said
    assert said.splitlines()[:3] == ["1", "0", "True 0.0"]


def test_nothing_is_known_where_nothing_is_to_be_kept():
    status, said = without_arithmetic(
        "import torch; print(torch.arange(3, device='cuda').tolist())",
        "h200",
        SIM_CUDA_KNOWN_MB="0",
    )
    assert (status, said) == (0, "[0, 0, 0]\n")


def test_a_word_that_is_no_count_ends_with_a_sentence():
    status, said = without_arithmetic(
        "import torch; torch.cuda.init()", "h200", SIM_CUDA_UNKNOWN="all"
    )
    assert status == 2
    assert "(SIM_CUDA_UNKNOWN: all): use least or most" in said


ROUTED = """
import torch
x = torch.randn(1024, 256, device="cuda")
picked = x[x.sum(1) > 0]
print(len(picked))
"""


def test_bytes_that_follow_from_a_count_are_an_interval():
    """The rows that are picked take 1 MiB at most, their places 8 KiB: in segments of 2 MiB, and of 20 MiB."""
    status, said = without_arithmetic(ROUTED, "h200", options=("--interval",))
    assert status == 0, said
    assert said.splitlines()[0] == "0"
    found = re.search(r"device 0: ([\d,]+) to ([\d,]+) bytes at the peak", said)
    least, most = (int(end.replace(",", "")) for end in found.groups())
    assert 2 << 20 <= least < most <= 24 << 20


def test_an_interval_needs_a_device_without_arithmetic():
    status, said = without_arithmetic(ROUTED, options=("--interval",), SIM_CUDA_ARITHMETIC="1")
    assert status == 1
    assert "name one by --device" in said
