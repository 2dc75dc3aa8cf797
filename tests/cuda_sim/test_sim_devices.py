"""Several devices, and what they are called."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from simulation import RUN, program
from torch import nn


def test_the_devices_say_what_they_are():
    assert torch.cuda.device_count() == 2
    assert torch.cuda.get_device_name() == "Simulated GPU"
    assert torch.cuda.get_device_capability() == (9, 0)


def test_values_go_from_device_to_device():
    first, second = nn.Linear(8, 8).to("cuda:0"), nn.Linear(8, 8).to("cuda:1")
    x = torch.randn(4, 8)
    out = second(first(x.to("cuda:0")).to("cuda:1"))
    out.sum().backward()
    assert out.device.index == 1
    assert first.weight.grad.device.index == 0
    with torch.no_grad():
        torch.testing.assert_close(out.cpu(), second.cpu()(first.cpu()(x)))
    transposed = torch.arange(6.0, device="cuda:0").view(2, 3).t()
    assert torch.equal(transposed.to("cuda:1").cpu(), torch.arange(6.0).view(2, 3).t())


def test_tensors_of_two_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")


COUNT = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid)"


@pytest.mark.parametrize("visible, count", [("1", 1), ("1,0", 2), ("0,7,1", 1)])
def test_the_visible_devices_are_those_of_the_variable(visible, count):
    status, said = program(COUNT, CUDA_VISIBLE_DEVICES=visible)
    assert status == 0, said
    assert said.split() == [str(count), f"0{int(visible[0]) + 1}000000-0000-0000-0000-000000000000"]


@pytest.mark.parametrize("cuda, status", [("'13.0'", 3), ("'12.8'", 1), ("None", 1)])
def test_a_torch_for_another_cuda_ends_with_a_sentence(tmp_path, cuda, status):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "version.py").write_text(f"cuda: Optional[str] = {cuda}\n")
    libraries = Path(os.environ["LD_PRELOAD"].split(":")[0]).parent
    run = [sys.executable, RUN, "--libraries", libraries, "--"]
    done = subprocess.run(
        [*run, sys.executable, "-c", "raise SystemExit(3)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status
    named = cuda.strip("'").replace("None", "none")
    assert (f"(CUDA: {named})" in done.stderr) == (status == 1)
