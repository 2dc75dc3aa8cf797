"""The host waits for no device in a step: counted on one without arithmetic, where torch's own CUDA code runs."""

import pytest
import torch
from benchmarks.cuda import calls

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        (1, {}),
        (2, {}),
        (1, {"sizer": True}),
        (2, {"sizer": True}),
        (1, {"weights": True}),  # of two ranks: sizer/test_late_weights.py
    ],
    ids=str,
)
def test_a_step_waits_for_no_device(ranks, kind):
    if calls.simulation() is None or torch.version.cuda is None:
        pytest.skip("counts on a simulated device")
    found = calls.counts_of("small ResNet-50 fp32", "brimful", ranks, **kind)
    assert found["cudaLaunchKernel"] > 50  # it ran
    waits = {name: found[name] for name in calls.WAITS if name in found}
    assert not waits
    assert found["collectives"] <= 2
    assert found["cudaStreamIsCapturing"] <= 30  # as many as torch's DDP
