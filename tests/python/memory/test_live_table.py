"""The live table: whose line holds what, in which step and phase."""

import inspect
import os
import pickle
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from brimful import memory


@pytest.fixture
def tracking():
    with memory.track():
        yield


def here() -> int:
    """The caller's line."""
    return inspect.currentframe().f_back.f_lineno


def block_of(tensor: torch.Tensor):
    block = memory.find_block(tensor)
    assert block is not None
    return block


def site_of(tensor: torch.Tensor) -> tuple[str, int, str]:
    site = block_of(tensor).site
    return os.path.basename(site.file), site.line, site.function


@pytest.mark.smoke
def test_a_block_has_bytes_line_step_and_phase(tracking):
    x, line = torch.empty(1000), here()
    block = block_of(x)
    assert (block.bytes, block.step, block.phase, block.data) == (4000, 0, "other", x.data_ptr())
    assert site_of(x) == ("test_live_table.py", line, inspect.currentframe().f_code.co_qualname)


def test_the_line_is_the_innermost_outside_torch(tracking):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.GELU(), nn.Linear(8, 300)))
    y, line = model(torch.randn(2, 8)), here()
    assert site_of(y)[:2] == ("test_live_table.py", line)
    assert block_of(y).phase == "forward"


def test_each_line_of_a_loop_and_of_code_made_at_run_time_is_distinguished(tracking):
    kept = []
    for number in range(50):
        scope = {"torch": torch}
        exec(compile("\n" * number + "x = torch.empty(10)", f"cell{number}.py", "exec"), scope)
        kept.append(scope["x"])
    lines = [(block_of(x).site.file, block_of(x).site.line) for x in kept]
    assert lines == [(f"cell{k}.py", k + 1) for k in range(50)]


def test_names_outside_ascii_are_read(tracking):
    scope = {"torch": torch}
    exec(compile("def éא(): return torch.empty(5)", "größe_模型_\U0001d54f.py", "exec"), scope)
    x = scope["éא"]()
    site = block_of(x).site
    assert (site.file, site.line, site.function) == ("größe_模型_\U0001d54f.py", 1, "éא")


def test_backward_has_the_line_of_its_forward(tracking):
    first = torch.randn(16, 16, requires_grad=True)
    second = torch.randn(16, 16, requires_grad=True)
    y, line_y = first.exp() @ second, here()
    loss = y.square().sum()
    loss.backward()
    assert block_of(second.grad).phase == "backward"
    assert site_of(second.grad)[1] == line_y
    assert site_of(first.grad)[1] == line_y


def test_a_custom_function_has_its_own_lines(tracking):
    grads = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            grads.append((grad * 2, here()))
            return grads[-1][0]

    x = torch.randn(300, requires_grad=True)
    Twice.apply(x).sum().backward()
    [(grad, line)] = grads
    assert site_of(grad)[1] == line
    assert block_of(grad).phase == "backward"


def test_recomputation_is_forward_and_has_its_lines(tracking):
    seen = []

    def part(x):
        y = x.sin()
        seen.append((y.untyped_storage(), block_of(y).phase, site_of(y)[1], here() - 1))
        return y.exp()

    x = torch.randn(300, requires_grad=True)
    checkpoint(part, x, use_reentrant=False).sum().backward()
    assert [(phase, found - line) for _, phase, found, line in seen] == [("forward", 0)] * 2


def test_the_optimizer_has_a_phase_and_marks_steps(tracking):
    model = nn.Linear(20, 20)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        assert memory.current_step() == step
        model(torch.randn(4, 20)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state[model.weight]["exp_avg"]
    assert (block_of(state).phase, block_of(state).step) == ("optimizer", 0)
    batch = torch.randn(4, 20)
    assert (block_of(batch).phase, block_of(batch).step) == ("other", 3)


def test_steps_marked_by_hand_are_the_only_ones(tracking):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory.mark_step()
    optimizer.step()
    assert memory.current_step() == 1


def test_an_optimizer_that_fails_does_not_leave_its_phase(tracking):
    class Failing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            raise ValueError("planted")

    optimizer = Failing([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ValueError, match="planted"):
        optimizer.step()
    x = torch.empty(100)
    assert block_of(x).phase == "other"
    y = torch.randn(30, requires_grad=True).exp()
    assert block_of(y).phase == "forward"


def test_a_closure_within_an_optimizer_is_forward_and_backward(tracking):
    parameter = nn.Parameter(torch.randn(100))
    optimizer = torch.optim.LBFGS([parameter], max_iter=2)
    seen = []

    def closure():
        optimizer.zero_grad()
        y = parameter.exp()
        seen.append(block_of(y).phase)
        y.sum().backward()
        seen.append(block_of(parameter.grad).phase)
        return y.sum()

    optimizer.step(closure)
    assert set(seen[::2]) == {"forward"}
    assert set(seen[1::2]) == {"backward"}


def test_live_is_sorted_and_forgets_what_was_freed(tracking):
    kept = [torch.empty(100) for _ in range(5)]
    big = torch.empty(10_000)
    table = memory.live()
    assert [use.bytes for use in table[:2]] == [40_000, 2000]
    assert (table[1].blocks, table[1].born) == (5, [(0, 5)])
    assert "40,000" in str(table) and "test_live_table.py" in str(table)
    del big, kept
    assert all(use.bytes < 2000 for use in memory.live())


def test_blocks_from_before_and_views_are_not_in_the_table():
    before = torch.empty(100)
    with memory.track():
        x = torch.empty(100)
        assert memory.find_block(before) is None
        assert memory.find_block(x[50:]).data == x.data_ptr()
        del before
        assert len(memory.live_blocks()) == 1
    assert memory.live_blocks() == []
    with memory.track():
        del x  # of another session
        assert memory.live_blocks() == []


def test_modules_are_named_in_forward_and_backward():
    model = nn.Sequential(nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 8))
    with memory.track(modules=model):
        y = model(torch.randn(2, 8))
        assert block_of(y).module == "2"
        y.sum().backward()
        assert block_of(model[0].weight.grad).module == "0"
        assert block_of(torch.empty(3)).module == ""
        pickle.dumps(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_forward_that_fails_leaves_its_module():
    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError("planted")

    model = nn.Sequential(nn.ReLU(), Failing())
    with memory.track(modules=model):
        with pytest.raises(ValueError, match="planted"):
            model(torch.randn(2))
        assert block_of(torch.empty(3)).module == ""


def test_threads_are_all_seen(tracking):
    kept = [[] for _ in range(8)]

    def work(mine):
        for k in range(500):
            x = torch.empty(64)
            if k % 10 == 0:
                mine.append(x)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in kept]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    blocks = [block for block in memory.live_blocks() if block.site.function.endswith("work")]
    assert len(blocks) == 400
    assert {block.bytes for block in blocks} == {256}
    counts = memory.tracking_counts()
    assert counts.births == 4000
    assert counts.unsited == 0


def test_starting_twice_is_an_error_and_stopping_twice_is_none(tracking):
    with pytest.raises(RuntimeError, match="tracked already"):
        memory.start_tracking()
    assert memory.tracking()
    memory.stop_tracking()
    memory.stop_tracking()
    assert not memory.tracking()
    memory.start_tracking()


def test_a_start_that_fails_leaves_nothing_on():
    for bad in ({"modules": "model"}, {"report": 5}):
        with pytest.raises(TypeError):
            memory.start_tracking(**bad)
        assert not memory.tracking()


def test_before_anything_was_tracked_there_is_nothing_to_report():
    run(
        """
        import pytest
        from brimful import memory

        assert memory.last_oom() is None
        assert memory.live_blocks() == memory.live() == []
        with pytest.raises(RuntimeError, match="never tracked"):
            memory.peak_by_category()
        memory.start_tracking()
        assert sum(memory.peak_by_category().by_category.values()) == memory.peak_by_category().bytes
        memory.stop_tracking()
        assert memory.last_oom() is None
        """
    )


def test_other_devices_are_refused(tracking):
    with pytest.raises(ValueError, match="device: meta"):
        memory.live("meta")
    with pytest.raises(ValueError, match="device: cuda:99"):
        memory.peak_by_category("cuda:99")
    with pytest.raises(ValueError, match="device: cuda:99"):
        memory.context_bytes("cuda:99")
    assert memory.context_bytes("cpu") is None


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_does_not_track_and_does_not_hang():
    out = run("""
        import os, threading, torch
        from brimful import memory
        memory.start_tracking()
        x = torch.empty(100)
        stop = False
        def work():
            while not stop:
                torch.empty(64)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads: t.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                del x
                y = torch.empty(10)
                ok = not memory.tracking() and memory.live_blocks() == []
                memory.start_tracking()
                z = torch.empty(10)
                os._exit(0 if ok and len(memory.live_blocks()) == 1 else 1)
            assert os.waitpid(child, 0)[1] == 0
        stop = True
        for t in threads: t.join()
        assert memory.find_block(x) is not None
        print("done")
    """)
    assert out == "done\n"


def test_workers_of_a_data_loader_run_while_tracking():
    out = run("""
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        from brimful import memory
        memory.start_tracking()
        data = TensorDataset(torch.arange(64.0).reshape(16, 4))
        print(sum(float(x.sum()) for x, in DataLoader(data, 4, num_workers=2)))
    """)
    assert out == "2016.0\n"


def test_the_end_of_the_process_may_come_while_tracking():
    out = run("""
        import threading, torch
        from brimful import memory
        memory.start_tracking(modules=torch.nn.Linear(2, 2))
        kept = torch.nn.Linear(50, 50)
        kept(torch.randn(3, 50)).sum().backward()
        started = threading.Event()
        def last():
            x = torch.empty(64)
            started.set()
            threading.main_thread().join()
            y = torch.empty(64)
        threading.Thread(target=last).start()
        started.wait()
        print("end")
    """)
    assert out == "end\n"


def test_a_refusal_leaves_nothing_in_the_table(tracking, no_limit):
    used = memory.stats("cpu").used_bytes
    before = memory.tracking_counts().births
    memory.set_limit("cpu", used + 1000)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(10_000)
    assert memory.stats("cpu").used_bytes == used
    assert memory.tracking_counts().births == before
    assert memory.peak_by_category().bytes == used
