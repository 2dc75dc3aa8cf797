"""torch.profiler on the simulated device: copies, with the call and the operator that asked for them."""

import json

import torch
from torch.profiler import ProfilerActivity, profile


def test_the_profiler_has_each_copy_with_its_operator(tmp_path):
    here = torch.arange(1 << 16, dtype=torch.float32)
    side = torch.cuda.Stream()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        there = here.cuda()
        with torch.cuda.stream(side):
            again = there.clone()
        back = again.cpu()
        torch.cuda.synchronize()
    assert torch.equal(back, here)
    path = tmp_path / "trace.json"
    profiled.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy"]
    kinds = [e["name"].split(" (")[0] for e in copies]
    assert kinds == ["Memcpy HtoD", "Memcpy DtoD", "Memcpy DtoH"]
    assert [e["args"]["bytes"] for e in copies] == [4 << 16] * 3
    assert copies[0]["args"]["stream"] != copies[1]["args"]["stream"]
    calls = {e["args"]["correlation"]: e for e in events if e.get("cat") == "cuda_runtime"}
    asked = [calls[e["args"]["correlation"]] for e in copies]
    assert all(e["name"].startswith("cudaMemcpyAsync") for e in asked)
    operators = {
        e["args"]["External id"]: e["name"]
        for e in events
        if e.get("cat") == "cpu_op" and "External id" in e["args"]
    }
    assert {operators[e["args"]["External id"]] for e in asked} == {"aten::copy_"}


def test_without_a_profiler_nothing_is_kept():
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
        torch.ones(4).cuda()
    torch.ones(1000).cuda()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        torch.ones(8).cuda()
    copies = [e for e in profiled.events() if e.name.startswith("Memcpy")]
    assert len(copies) == 1
