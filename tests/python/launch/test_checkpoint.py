"""Checkpoints: rank 0 writes, all read; a failure is everybody's, and the old file survives it."""

import os
import resource
import signal

import pytest
import torch
import torch.distributed as dist
from forked_scripts import run_forked_script
from models import classes, cross_entropy, wrap
from rank_processes import raised

import brimful
from brimful.checkpoint import PerRank

OLD = {"step": 7, "weights": torch.arange(5.0)}


def is_old(path):
    state = torch.load(path, weights_only=True)
    return state["step"] == 7 and torch.equal(state["weights"], OLD["weights"])


def save_and_load_job(rank, path):
    torch.manual_seed(rank.index)
    model = wrap(torch.nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    state["rank"] = rank.index
    brimful.save_on_rank0(state, path)
    assert os.path.exists(path)
    return brimful.load(path), state


@pytest.mark.parametrize("size", [1, 3])
def test_what_rank_0_saved_is_loaded_on_every_rank(ranks, tmp_path, size):
    results = ranks(save_and_load_job, tmp_path / "model.pt", size=size)
    expected = results[0][1]
    for loaded, _ in results:
        assert loaded["rank"] == 0
        assert all(torch.equal(loaded["model"][k], v) for k, v in expected["model"].items())
        assert loaded["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.smoke
def test_a_process_without_a_group_saves_and_loads_alone(tmp_path):
    brimful.save_on_rank0(OLD, str(tmp_path / "alone.pt"))
    assert is_old(tmp_path / "alone.pt")
    assert torch.equal(brimful.load(tmp_path / "alone.pt")["weights"], OLD["weights"])
    assert os.stat(tmp_path / "alone.pt").st_mode & 0o777 == 0o666 & ~current_umask()


def sizers_job(rank, path):
    """Each rank has found another split; a resumed job begins with them."""

    class Broken:
        def state_dict(self):
            raise OSError("planted" if rank.index == 1 else "everywhere")

    model = wrap(torch.nn.Linear(6, 3))
    sizer = brimful.BatchSizer(model, pieces=1 + rank.index)
    sizer.load_state_dict({**sizer.state_dict(), "piece_rows": 4.0 - rank.index})
    state = {"model": model.module.state_dict(), "own": {"sizer": PerRank(sizer)}, "step": 3}
    brimful.save_on_rank0(state, path)
    loaded = brimful.load(path)
    resumed = brimful.BatchSizer(wrap(torch.nn.Linear(6, 3)))
    PerRank(resumed).load_state_dict(loaded["own"]["sizer"])
    outcome = resumed.step(classes(8), cross_entropy)
    broken = PerRank(Broken()) if rank.index == 1 else PerRank(sizer)
    failed = raised(brimful.save_on_rank0, {"own": broken}, path)
    del loaded["own"]["sizer"][f"rank{rank.index}"]
    missing = raised(PerRank(resumed).load_state_dict, loaded["own"]["sizer"])
    return outcome.split, loaded["step"], failed, str(missing)


def test_what_each_rank_has_of_its_own_is_saved_on_rank_0_and_loaded_by_its_rank(ranks, tmp_path):
    results = ranks(sizers_job, tmp_path / "run.pt")
    assert [split for split, *_ in results] == [[4, 4], [3, 3, 2]]
    for rank, (_, step, failed, missing) in enumerate(results):
        assert step == 3
        assert type(failed) is (OSError if rank == 1 else RuntimeError), failed
        assert "planted" in str(failed) and (rank == 1 or "(rank: 1)" in str(failed))
        assert f"(rank: {rank}, saved: rank{1 - rank})" in missing


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


class Raises:
    """Raises, or worse, when it is pickled."""

    def __init__(self, error=None):
        self.error = error

    def __reduce__(self):
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise self.error


def limit_files(size):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


# Where rank 0 fails: what is saved, and where to, below a folder that holds old.pt and linked.pt or folder/in/.
POINTS = {
    "no folder": ("no/such.pt", OLD, FileNotFoundError, "No such file"),
    "open": ("linked.pt", OLD, OSError, "this is a symbolic link"),
    "write": ("old.pt", {"weights": torch.zeros(1 << 20)}, OSError, "cannot write"),
    "rename": ("folder", OLD, OSError, "this is a folder"),
    "pickle": (
        "old.pt",
        {"a": torch.ones(2), "b": Raises(KeyError("planted"))},
        KeyError,
        "planted",
    ),
    "memory": (
        "old.pt",
        Raises(torch.OutOfMemoryError("planted")),
        torch.OutOfMemoryError,
        "planted",
    ),
}


def failing_job(rank, folder, point):
    name, state, _, _ = POINTS[point]
    if rank.index == 0 and point == "write":
        limit_files(1 << 16)
    error = raised(brimful.save_on_rank0, state, os.path.join(folder, name))
    brimful.save_on_rank0({"next": 1}, os.path.join(folder, "next.pt"))
    seen = (
        type(error).__name__,
        str(error),
        getattr(error, "rank", None),
        getattr(error, "step", None),
    )
    return seen, isinstance(error, OSError), brimful.load(os.path.join(folder, "next.pt"))


@pytest.mark.parametrize("point", POINTS)
def test_a_save_that_fails_on_rank_0_raises_everywhere_and_keeps_the_old_file(
    ranks, tmp_path, point
):
    brimful.save_on_rank0(OLD, tmp_path / "old.pt")
    (tmp_path / "linked.pt").symlink_to("old.pt")
    (tmp_path / "folder" / "in").mkdir(parents=True)
    before = set(tmp_path.rglob("*"))
    name, _, kind, words = POINTS[point]
    (first, is_os, next_0), (second, _, next_1) = ranks(failing_job, str(tmp_path), point)
    assert words in first[1] and first[2] is None
    assert is_os == issubclass(kind, OSError)
    assert kind is OSError or first[0] == kind.__name__
    assert second[0] == ("RankOutOfMemory" if point == "memory" else "RankFailed")
    assert second[1].startswith(f"rank 0 could not save a checkpoint (path: {tmp_path / name}): ")
    assert words in second[1] and second[2:] == (0, -1)
    assert next_0 == next_1 == {"next": 1}
    assert is_old(tmp_path / "old.pt") and is_old(tmp_path / "linked.pt")
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "next.pt"}


def load_job(rank, folder):
    path = os.path.join(folder, "old.pt" if rank.index == 0 else "missing.pt")
    error = raised(brimful.load, path)
    again = brimful.load(os.path.join(folder, "old.pt"))
    return type(error).__name__, str(error), getattr(error, "rank", None), again["step"]


def test_a_load_that_fails_on_one_rank_raises_everywhere(ranks, tmp_path):
    brimful.save_on_rank0(OLD, tmp_path / "old.pt")
    first, second, third = ranks(load_job, str(tmp_path), size=3)
    assert first[0] == "RankFailed" and first[2] == 1 and "missing.pt" in first[1]
    assert first[1].startswith("rank 1 could not load a checkpoint")
    assert second[0] == third[0] == "FileNotFoundError"
    assert [first[3], second[3], third[3]] == [7, 7, 7]


JOIN = """
import os, signal, sys
import torch, torch.distributed as dist
from rank_processes import join_group, raised
from test_checkpoint import Raises
import brimful
rank, size, path = int(sys.argv[1]), int(sys.argv[3]), sys.argv[4]
"""

KILLED = (
    JOIN
    + """
victim, while_saving = int(sys.argv[5]), sys.argv[6] == "saving"
join_group(rank, size, int(sys.argv[2]), timeout_s=2)
dist.barrier()
if rank == victim and not while_saving:
    os.kill(os.getpid(), signal.SIGKILL)
state = {"weights": torch.zeros(1 << 18), "end": Raises() if while_saving else None}
error = raised(brimful.save_on_rank0, state, path)
assert isinstance(error, brimful.RankFailed), repr(error)
assert error.rank == victim and error.step == -1 and error.seconds < 6, (str(error), error.seconds)
assert f"(missing: rank {victim}; timeout_ms: 2000)" in str(error), str(error)
assert "save a checkpoint (path: " in str(error)
os._exit(5)
"""
)


@pytest.mark.parametrize(
    ("victim", "when"), [(0, "saving"), (0, "before"), (1, "before"), (2, "before")]
)
def test_a_rank_that_is_killed_is_named_by_the_others(tmp_path, victim, when):
    brimful.save_on_rank0(OLD, tmp_path / "old.pt")
    results = run_forked_script(KILLED, 3, tmp_path / "old.pt", victim, when, size=3)
    for rank, (status, output) in enumerate(results):
        assert status == (-signal.SIGKILL if rank == victim else 5), output
    if victim == 0:
        assert is_old(tmp_path / "old.pt")
    else:  # rank 0 did its part
        assert torch.load(tmp_path / "old.pt", weights_only=True)["end"] is None


# Rank 0 serves the store and ends as soon as it may.
FIRST_ENDS = (
    JOIN
    + """
import datetime
patience = datetime.timedelta(seconds=15)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
store = dist.TCPStore("127.0.0.1", int(sys.argv[5]), is_master=rank == 0, timeout=patience)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
fails = sys.argv[6] == "fails"
error = raised(brimful.save_on_rank0, {}, path + "/no/such.pt" if fails else path + "/last.pt")
if fails and rank != 0:
    assert isinstance(error, brimful.RankFailed) and "No such file" in str(error), repr(error)
else:
    assert (error is not None) == fails, repr(error)
os._exit(0)
"""
)


@pytest.mark.parametrize("outcome", ["works", "fails"])
def test_the_rank_that_serves_the_store_may_end_after_its_last_save(tmp_path, outcome):
    port = free_port()
    for status, output in run_forked_script(FIRST_ENDS, 4, tmp_path, port, outcome, size=4):
        assert status == 0, output


def free_port():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store.port


def late_job(rank, path):
    group = dist.new_group([1, 0])  # its rank 0 is not the world's, in the order given
    own = dist.get_rank(group)
    brimful.save_on_rank0({"rank": rank.index}, path, group=group)
    return own, brimful.load(path, group=group)["rank"]


def test_rank_0_is_that_of_the_group(ranks, tmp_path):
    results = ranks(late_job, tmp_path / "group.pt")
    first = next(index for index, (own, _) in enumerate(results) if own == 0)
    assert [saved for _, saved in results] == [first, first]


def test_map_location_is_torchs(tmp_path):
    brimful.save_on_rank0(OLD, tmp_path / "a.pt")
    assert brimful.load(tmp_path / "a.pt", map_location="meta")["weights"].is_meta


def test_a_checkpoint_of_a_gpu_is_loaded_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    storage = torch.arange(3.0).untyped_storage()
    from brimful import checkpoint

    assert checkpoint._own_device(storage, "cuda:5") is storage
    assert checkpoint._own_device(storage, "cpu") is None


@pytest.mark.gpu
def test_tensors_of_any_gpu_go_to_the_ranks_own(tmp_path):
    device = torch.cuda.device_count() - 1
    state = {"gpu": torch.ones(2, device="cuda:0"), "cpu": torch.ones(2)}
    brimful.save_on_rank0(state, tmp_path / "a.pt")
    with torch.cuda.device(device):
        loaded = brimful.load(tmp_path / "a.pt")
    assert loaded["gpu"].device == torch.device("cuda", device)
    assert loaded["cpu"].device.type == "cpu"
