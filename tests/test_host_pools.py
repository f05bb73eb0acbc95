"""Threads, processes and the caller as loaders: same numbers, clean ends, and messages that say what to do."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastdata
from fastdata.backends import _pools
from fastdata.errors import SampleError, UsageError, WorkerError
from fastdata.testing import corrupt, write_numbered_folder


def draw_from_all(picture: torch.Tensor) -> torch.Tensor:
    """Write one draw of each global generator into the first pixels."""
    picture[0, 0, 0] = random.randrange(256)
    picture[1, 0, 0] = int(np.random.randint(256))
    picture[2, 0, 0] = int(torch.randint(256, (1,)))
    picture[:, 0, 1] = torch.randint(256, (3,), dtype=torch.uint8)
    return picture


def fail_on_dark(picture: torch.Tensor) -> torch.Tensor:
    """Raise on pictures of ids below 16."""
    if picture[1].float().mean() < 20:
        raise ValueError("too dark for me")
    return picture


def wrong_shape(picture: torch.Tensor) -> torch.Tensor:
    return picture[:, ::2]


def leave(_: torch.Tensor) -> torch.Tensor:
    os._exit(3)


def die_later(picture: torch.Tensor) -> torch.Tensor:
    """End the process by SIGSEGV at the last pictures."""
    if int(picture[1].float().mean()) // 16 == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    return picture


def die(picture: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return picture


def slow(picture: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return picture


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered_folder(tmp_path_factory.mktemp("pools") / "numbered", 16)


def _open(data: Path, *functions: Any, **arguments: Any) -> fastdata.Pipeline:
    given = {"backend": "torchvision", "batch_size": 8, "dtype": "uint8", "workers": 2} | arguments
    return fastdata.open_pipeline(data, transform=(fastdata.Resize((32, 32)), *functions), **given)


def _run(loader: fastdata.Pipeline) -> tuple[list[int], torch.Tensor]:
    with loader:
        batches = list(loader)
    return [i for b in batches for i in b.ids.tolist()], torch.cat([b.images for b in batches])


def test_callables_draw_from_seed_epoch_and_id_in_every_pool(data: Path) -> None:
    """B90: draws differ between samples and workers, and are the same for any pool and worker count."""
    pools = [(0, "auto"), (1, "processes"), (3, "processes")]
    runs = [_run(_open(data, draw_from_all, workers=w, options=fastdata.HostOptions(pool=p))) for w, p in pools]
    for ids, images in runs[1:]:
        assert ids == runs[0][0]
        assert torch.equal(images, runs[0][1])
    draws = {tuple(image[:, 0, 1].tolist()) for image in runs[0][1]}
    assert len(draws) == 64


def test_callables_draw_anew_in_another_epoch(data: Path) -> None:
    with _open(data, draw_from_all, workers=0, shuffle=False) as loader:
        first, second = (torch.cat([b.images for b in loader]) for _ in range(2))
    assert (first[:, :, 0, 1] != second[:, :, 0, 1]).any(dim=1).float().mean() > 0.9


def test_the_callers_random_state_is_left_alone(data: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    with _open(data, draw_from_all, workers=0) as loader:
        next(iter(loader))
    assert torch.equal(torch.rand(1), expected)


def test_threads_refuse_callables_that_would_share_random_state(data: Path) -> None:
    with pytest.raises(UsageError, match="threads"):
        _open(data, draw_from_all, options=fastdata.HostOptions(pool="threads"))


def test_processes_and_threads_give_the_same_batches(data: Path) -> None:
    runs = [_run(_open(data, options=fastdata.HostOptions(pool=pool))) for pool in ("threads", "processes")]
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])


def test_a_callable_that_cannot_be_sent_is_refused_at_construction(data: Path) -> None:
    with pytest.raises(UsageError, match="top level"):
        _open(data, lambda picture: picture)


def test_an_exception_in_a_callable_names_the_sample(data: Path) -> None:
    with pytest.raises(WorkerError, match=r"(?s)ant.*too dark for me"):
        _run(_open(data, fail_on_dark))


def test_a_callable_that_changes_the_shape_is_named(data: Path) -> None:
    with pytest.raises(WorkerError, match=r"wrong_shape.*\(3, 16, 32\).*\(3, 32, 32\)"):
        _run(_open(data, wrong_shape, workers=0))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (die, r"ended by SIGKILL; .* memory runs out"),
        (die_later, r"ended by SIGSEGV; .* Native code crashed"),
        (leave, r"exit code 3 before .* guard"),
    ],
)
def test_a_worker_that_ends_ends_the_epoch_and_says_how(data: Path, function: Any, said: str) -> None:
    with _open(data, function) as loader:
        for _ in range(2):
            with pytest.raises(WorkerError, match=said):
                list(loader)
    assert not multiprocessing.active_children()


def test_a_script_without_a_main_guard_is_told_of_the_guard(data: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(_SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    argv = [sys.executable, str(script), str(data), "processes"]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 1
    (message,) = [line for line in done.stderr.splitlines() if "WorkerError: " in line]
    assert "exit code 1 before it had loaded a batch" in message
    assert "guard" in message
    assert "memory" not in message


def test_corrupt_files_are_named_across_processes(tmp_path: Path) -> None:
    """B24: the final message in the main process names the file."""
    folder = write_numbered_folder(tmp_path / "bad", 4)
    bad = corrupt(folder / "bee" / "0003.jpg")
    with pytest.raises(SampleError, match=r"bee/0003\.jpg") as caught:
        _run(_open(folder, options=fastdata.HostOptions(pool="processes")))
    assert str(bad) in str(caught.value)


def test_too_little_shared_memory_is_said_before_the_first_batch(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B98."""
    real = os.statvfs("/dev/shm")

    class Small:
        f_bavail, f_frsize = 10, real.f_frsize

    monkeypatch.setattr(_pools.os, "statvfs", lambda _: Small)
    with pytest.raises(WorkerError, match=r"/dev/shm.*MB free.*shm-size"):
        _open(data, options=fastdata.HostOptions(pool="processes"))


def test_kept_batches_hold_no_descriptors(data: Path) -> None:
    """B99: labels and images of many batches are kept while few descriptors are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    options = fastdata.HostOptions(pool="processes")
    with _open(data, batch_size=2, options=options) as loader:
        next(iter(loader))
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 24, hard))
        try:
            kept = [batch for _ in range(3) for batch in loader]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(kept) == 96


def test_memory_does_not_grow_over_epochs(data: Path) -> None:
    """B104."""
    with _open(data) as loader:
        sizes = []
        for _ in range(12):
            for _batch in loader:
                pass
            sizes.append(_resident_bytes())
    assert sizes[11] - sizes[3] < 0.05 * sizes[3]


_SCRIPT = """
import os, sys, time, fastdata
from test_host_pools import slow
if __name__ == "__main__":
    functions = (slow,) if sys.argv[2] == "processes" else ()
    loader = fastdata.open_pipeline(sys.argv[1], backend="pil", workers=2, batch_size=8,
        transform=(fastdata.Resize((32, 32)), *functions))
    print("ready", flush=True)
    while True:
        for batch in loader:
            print("batch", flush=True)
"""


@pytest.mark.parametrize("pool", ["threads", "processes"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_all_processes(data: Path, tmp_path: Path, pool: str, sent: signal.Signals) -> None:
    """B101: at start and in mid-epoch all processes go within ten seconds, with one trace at most."""
    script = tmp_path / "run.py"
    script.write_text(_SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    for lines, delay in ((1, 0.0), (2, 0.05)):
        process = subprocess.Popen(
            [sys.executable, str(script), str(data), pool],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        for _ in range(lines):
            process.stdout.readline()
        time.sleep(delay)
        if sent == signal.SIGINT:
            os.killpg(process.pid, sent)  # as a terminal does
        else:
            process.terminate()
        _, errors = process.communicate(timeout=15)
        assert process.returncode in (-sent, 1, 128 + sent)
        assert errors.count("Traceback (most recent call last)") <= 1, errors
        deadline = time.monotonic() + 10
        while (left := _processes_of_session(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left


def _processes_of_session(session: int) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            fields = stat.rsplit(")", 1)[1].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(stat)
    return found


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
