"""Failures inside "dali" pipelines: pictures that DALI cannot take, memory that runs out, DALI not starting."""

from __future__ import annotations

import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fastdata
from fastdata.errors import FastDataError, WorkerError
from fastdata.testing import write_numbered_folder
from tests.dali_pipelines import check_pixels, epoch_ids, open_dali

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")

from nvidia import dali

from fastdata.backends import _dali_feed, _dali_graph
from fastdata.backends._dali_graph import DaliGraph, GraphError, GraphInputs

ALONE, COMPANY = "DALI failed on it", "DALI failed on its batch"
BAD = 14
"""The sample whose file DALI is made to fail on: bee/0004.jpg."""


def message(cause: str, operator: str = "decoders.image") -> str:
    """What DALI 2.4 says of an operator that failed: its name, our own lines that made it, and the cause."""
    return (
        "RuntimeError: Critical error in pipeline:\nCritical error in pipeline:\n"
        f"Error in MIXED operator `nvidia.dali.fn.{operator}`,\n"
        "which was used in the pipeline definition with the following traceback:\n\n"
        '  File "fastdata/backends/_dali_graph.py", line 198, in _build\n    pipe.set_outputs(_define(settings))\n'
        '  File "fastdata/backends/_dali_graph.py", line 267, in _define\n'
        "    pictures = fn.slice(fn.decoders.image(encoded, **decoder), **window)\n\n"
        f"encountered:\n\n{cause}\nCurrent pipeline object is no longer valid.\n"
        "Current pipeline object is no longer valid."
    )


OUT_OF_MEMORY = message("CUDA allocation failed")


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    return write_numbered_folder(tmp_path / "numbered", 10)


@pytest.fixture(autouse=True)
def _quiet(capfd: pytest.CaptureFixture[str]) -> Any:
    """Keep what DALI's codecs print of bad files away."""
    yield
    capfd.readouterr()


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each DALI pipeline that is made, how many are alive then, itself included."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    counts: list[int] = []
    honest = dali.Pipeline.__init__

    def init(pipe: Any, *arguments: Any, **named: Any) -> None:
        honest(pipe, *arguments, **named)
        alive.add(pipe)
        counts.append(len(alive))

    monkeypatch.setattr(dali.Pipeline, "__init__", init)
    return counts


def path_of(root: Path, sample_id: int) -> Path:
    return root / ("ant", "bee", "cat", "dog")[sample_id // 10] / f"{sample_id % 10:04d}.jpg"


def trust_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let DALI get what our own look would keep from it."""
    honest = _dali_feed.read_headers_at

    def trusting(addresses: Any, lengths: Any) -> Any:
        headers = honest(addresses, lengths)
        headers["refusal"] = 0
        return headers

    monkeypatch.setattr(_dali_feed, "read_headers_at", trusting)


def spoil(root: Path, *sample_ids: int) -> None:
    """Write files that Pillow takes, and that DALI's parser refuses without naming the sample."""
    for sample_id in sample_ids:
        data = path_of(root, sample_id).read_bytes()
        path_of(root, sample_id).write_bytes(data[:20] + b"\xff\xd0" + data[20:])


def spoil_first_reads(monkeypatch: pytest.MonkeyPatch, loader: fastdata.Pipeline, positions: set[int]) -> None:
    """Let the first read of some samples give Huffman tables that DALI fails on, and later reads the true file.

    DALI reads everything that our own look lets through and Pillow decodes (its codecs stand in for each other), so a
    failure that the reference can heal has to be made: here by a file that is being written while it is read.
    """
    honest, left = loader.source.read, set(positions)

    def read(position: int) -> Any:
        data = bytes(honest(position))
        if position not in left:
            return data
        left.remove(position)
        at = data.index(b"\xff\xc4")
        return data[: at + 5] + b"\xff" * 16 + data[at + 21 :]

    monkeypatch.setattr(loader.source, "read", read)
    monkeypatch.setattr(loader.source, "read_many", lambda positions: [read(p) for p in positions.tolist()])


def test_a_failure_inside_dali_costs_only_that_sample_the_fast_decoder(
    numbered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_dali(numbered) as loader:
        spoil_first_reads(monkeypatch, loader, {14, 15, 30})
        for epoch in range(3):
            assert sorted(i for batch in loader for i in check_pixels(batch)) == list(range(40))
            report = loader.report()
            # Two lie in one batch: a retry heals the second. Parts of epoch 1 were read before that was known.
            assert report.fallbacks["DALI failed on it"] == 2 or epoch == 1
            assert not report.skipped
            # In later epochs these go to the reference at once.
            assert bool(report.details["dali_errors"]) == (epoch == 0)


def test_a_failure_in_a_batch_that_nobody_takes_does_no_harm(numbered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_dali(numbered, shuffle=False, batch_size=4) as loader:
        spoil_first_reads(monkeypatch, loader, {4, 9})
        for _ in range(3):
            batches = iter(loader)
            check_pixels(next(batches))
            del batches
            time.sleep(0.1)
        assert sorted(i for batch in loader for i in check_pixels(batch)) == list(range(40))


def test_where_dali_names_no_sample_one_batch_goes_to_the_reference_once_and_one_sample_for_good(
    numbered: Path, monkeypatch: pytest.MonkeyPatch, builds: list[int]
) -> None:
    spoil(numbered, BAD)
    trust_headers(monkeypatch)
    with open_dali(numbered, shuffle=False) as loader:
        assert epoch_ids(loader) == list(range(40))
        report = loader.report()
        assert report.fallbacks == {COMPANY: 8}
        assert report.details["dali_errors"] == ["nvImageCodec failure: '#3'"]
        for _ in range(2):
            assert epoch_ids(loader) == list(range(40))
            assert loader.report().fallbacks == {ALONE: 1}
            assert not loader.report().details["dali_errors"]
    assert len(builds) == 3  # at the start, after the failure, and after the sample was found


def test_all_samples_of_a_batch_that_dali_cannot_take_are_found_up_to_a_limit(
    numbered: Path, monkeypatch: pytest.MonkeyPatch, builds: list[int]
) -> None:
    spoil(numbered, 8, 9, 10, 11, 12, 13)
    trust_headers(monkeypatch)
    with open_dali(numbered, shuffle=False) as loader:
        fallbacks = []
        for _ in range(3):
            assert epoch_ids(loader) == list(range(40))
            fallbacks.append(dict(loader.report().fallbacks))
    assert fallbacks == [{COMPANY: 8}, {COMPANY: 4, ALONE: 4}, {ALONE: 6}]
    assert len(builds) == 1 + (1 + 4) + (1 + 2)


def test_what_the_reference_refuses_too_is_found_without_another_rebuild(
    numbered: Path, monkeypatch: pytest.MonkeyPatch, builds: list[int]
) -> None:
    data = path_of(numbered, BAD).read_bytes()
    path_of(numbered, BAD).write_bytes(data[:20] + b"\xff\xd0" + bytes(len(data) - 22))
    trust_headers(monkeypatch)
    with open_dali(numbered, shuffle=False, on_error="skip") as loader:
        for epoch in range(2):
            assert epoch_ids(loader) == [i for i in range(40) if i != BAD]
            report = loader.report()
            assert [skipped.sample_id for skipped in report.skipped] == [BAD]
            assert report.fallbacks == ({COMPANY: 7} if epoch == 0 else {})
    assert len(builds) == 2


class FailsInCompany(DaliGraph):
    """Fails, naming no sample, on batches that hold a certain file; takes it alone. Reported by no DALI so far."""

    encoded = b""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.doomed: deque[bool] = deque()

    def start(self, inputs: GraphInputs) -> None:
        held = any(bytes(row[: len(self.encoded)]) == self.encoded for row in inputs.encoded)
        self.doomed.append(held and len(inputs.mirror) > 1)
        super().start(inputs)

    def receive(self) -> Any:
        pictures = super().receive()
        if self.doomed.popleft():
            raise GraphError(message("nvImageCodec failure: '#3'"))
        return pictures

    def drain(self) -> None:
        super().drain()
        self.doomed.clear()

    def close(self) -> None:
        super().close()
        self.doomed.clear()


def test_a_failure_that_no_sample_explains_refuses_those_that_two_failed_batches_share(
    numbered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dali_graph, "DaliGraph", FailsInCompany)
    monkeypatch.setattr(FailsInCompany, "encoded", path_of(numbered, BAD).read_bytes())
    with open_dali(numbered, seed=1) as loader:
        failed = []
        for _ in range(2):
            for batch in loader:
                ids = check_pixels(batch)
                if BAD in ids:
                    failed.append(set(ids))
            assert loader.report().fallbacks == {COMPANY: 8}
        assert 1 <= len(failed[0] & failed[1]) < 8
        for _ in range(2):  # parts of the first were made before the second failure
            assert sorted(epoch_ids(loader)) == list(range(40))
        assert loader.report().fallbacks == {ALONE: len(failed[0] & failed[1])}


def test_a_failure_that_no_sample_explains_refuses_nobody_where_the_companions_stay_the_same(
    numbered: Path, monkeypatch: pytest.MonkeyPatch, builds: list[int]
) -> None:
    monkeypatch.setattr(_dali_graph, "DaliGraph", FailsInCompany)
    monkeypatch.setattr(FailsInCompany, "encoded", path_of(numbered, BAD).read_bytes())
    with open_dali(numbered, shuffle=False) as loader:
        for _ in range(3):
            assert epoch_ids(loader) == list(range(40))
            assert loader.report().fallbacks == {COMPANY: 8}
    assert len(builds) == 1 + 3


@pytest.mark.parametrize(
    ("said", "cause", "samples", "by_pictures"),
    [
        (message("nvImageCodec failure: '#3'"), "nvImageCodec failure: '#3'", [], True),
        (message("Failed to decode sample #12 : "), "Failed to decode sample #12", [12], True),
        (
            message("Slice can't be placed out of bounds\nC++ context: [/opt/dali/x.h:106] ", "slice"),
            "Slice can't be placed out of bounds", [], True,
        ),
        (OUT_OF_MEMORY, "CUDA allocation failed", [], False),
        (message("Can't allocate 77 bytes on device 0."), "Can't allocate 77 bytes on device 0.", [], False),
        (
            message("CUDA runtime API error cudaErrorMemoryAllocation (2):\nout of memory"),
            "CUDA runtime API error cudaErrorMemoryAllocation (2): out of memory", [], False,
        ),
        (message("nvImageCodec failure: '#5'"), "nvImageCodec failure: '#5'", [], False),
        (message("std::bad_alloc", "decoders.image_slice"), "std::bad_alloc", [], False),
        ("OutOfMemoryError: CUDA out of memory. Tried", "OutOfMemoryError: CUDA out of memory. Tried", [], False),
        ("TypeError: no such argument", "TypeError: no such argument", [], False),
    ],
)  # fmt: skip
def test_dalis_messages_are_told_apart_by_their_cause_alone(
    said: str, cause: str, samples: list[int], by_pictures: bool
) -> None:
    error = GraphError(said)
    assert error.cause == cause
    assert sorted(error.samples) == samples
    assert error.by_pictures is by_pictures


def test_host_memory_that_runs_out_inside_the_decoder_is_no_pictures_fault(numbered: Path) -> None:
    # DALI's true message: a header of 30,000 x 30,000 pixels, and a process that may take one GiB more.
    script = """if True:
        import resource, sys
        from pathlib import Path
        import numpy as np
        import fastdata
        from fastdata.backends._dali_graph import DaliGraph, GraphError, GraphInputs
        loader = fastdata.open_pipeline(
            sys.argv[1], backend="dali", transform=fastdata.imagenet_train(32), batch_size=1, workers=1
        )
        graph = DaliGraph(loader._settings)
        def load(data, side):
            origin, shape = np.zeros((1, 2)), np.full((1, 2), side)
            rows = np.frombuffer(data, np.uint8)[None]
            graph.start(GraphInputs(rows, origin.astype(np.int32), shape.astype(np.int32), origin.astype(np.float32),
                                    shape.astype(np.float32), np.zeros(1, np.int32)))
            graph.receive()
        data = next(Path(sys.argv[1]).glob("*/*.jpg")).read_bytes()
        load(data, 40)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + 2**30, taken + 2**30))
        at = data.index(b"\\xff\\xc0") + 5
        try:
            load(data[:at] + (30000).to_bytes(2, "big") * 2 + data[at + 4:], 30000)
        except GraphError as error:
            assert "decoders.image" in str(error), error
            assert not error.by_pictures, error
            assert "bad_alloc" in error.cause and "fn." not in error.cause, error.cause
        else:
            raise AssertionError("it did not fail")
    """
    found = subprocess.run([sys.executable, "-c", script, str(numbered)], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


def fail_once(after: int, error: Exception, honest: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that fails in one of its calls."""
    left = [after]

    def call(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise error
        return honest(*arguments, **named)

    return call


def test_memory_that_runs_out_inside_the_decoder_is_raised_with_advice_and_refuses_nobody(
    numbered: Path, monkeypatch: pytest.MonkeyPatch, builds: list[int]
) -> None:
    monkeypatch.setattr(DaliGraph, "receive", fail_once(1, GraphError(OUT_OF_MEMORY), DaliGraph.receive))
    with open_dali(numbered, shuffle=False) as loader:
        batches = iter(loader)
        assert check_pixels(next(batches)) == list(range(8))
        with pytest.raises(WorkerError, match=r"CUDA allocation failed.*smaller batch size.*queue_depth=1") as raised:
            next(batches)
        assert "fn.slice" not in str(raised.value)
        assert len(str(raised.value)) < 400
        assert epoch_ids(loader) == list(range(40))
        assert not loader.report().fallbacks
    assert builds == [1, 1]


def test_a_dali_that_cannot_be_built_is_a_clear_error_each_time_until_it_can(
    numbered: Path, monkeypatch: pytest.MonkeyPatch, builds: list[int]
) -> None:
    def fail(_: Any) -> Any:
        raise RuntimeError("CUDA allocation failed")

    raised = []  # kept, as by a caller who logs them: they must not keep DALI's memory
    with open_dali(numbered, shuffle=False) as loader:
        with monkeypatch.context() as patched:
            patched.setattr(_dali_graph, "_define", fail)
            for _ in range(2):
                with pytest.raises(WorkerError, match="CUDA allocation failed") as caught:
                    epoch_ids(loader)
                assert isinstance(caught.value, FastDataError)
                raised.append(caught.value)
        assert epoch_ids(loader) == list(range(40))
    assert builds == [1, 1, 1]


def test_a_dali_that_cannot_be_rebuilt_is_a_clear_error_and_the_next_epoch_builds_anew(
    numbered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(numbered, BAD)
    trust_headers(monkeypatch)
    monkeypatch.setattr(_dali_graph, "_build", fail_once(1, MemoryError("of the test"), _dali_graph._build))
    with open_dali(numbered, shuffle=False) as loader:
        with pytest.raises(WorkerError, match="MemoryError: of the test"):
            epoch_ids(loader)
        assert epoch_ids(loader) == list(range(40))


def test_a_run_that_cannot_be_started_is_raised_in_its_turn(numbered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 3 + 5 + 1  # three blank runs, an epoch, and the next one's second batch, begun while this one ends
    monkeypatch.setattr(_dali_graph, "_feed", fail_once(calls, MemoryError("of the test"), _dali_graph._feed))
    with open_dali(numbered, shuffle=False) as loader:
        assert epoch_ids(loader) == list(range(40))
        batches = iter(loader)
        assert check_pixels(next(batches)) == list(range(8))
        with pytest.raises(WorkerError, match="MemoryError: of the test"):
            next(batches)
        assert epoch_ids(loader) == list(range(40))


def test_a_failed_dali_is_gone_before_its_successor_is_built(
    numbered: Path, monkeypatch: pytest.MonkeyPatch, builds: list[int]
) -> None:
    spoil(numbered, 3, BAD, 30)
    trust_headers(monkeypatch)
    with open_dali(numbered) as loader:
        assert sorted(epoch_ids(loader)) == list(range(40))
    assert len(builds) >= 3
    assert set(builds) == {1}
