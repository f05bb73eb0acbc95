"""All that has to be known about the "dali" backend on a GPU machine, in one run and one JSON file.

Facts of the machine; the tests marked ``gpu``; and checks whose figures matter: memory over 20 epochs, lines printed,
train and validation side by side, odd files at speed, early ends, two ranks where there are two GPUs. A check that
fails is recorded with its traceback and the others still run. Exit code 1 if any failed.

    python benchmarks/gpu_check.py PHOTOS --out gpu-check.json
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from PIL import Image

import fastdata
from benchmarks.dali_common import Results, Workspace, base_parser, copies
from fastdata.backends._dali_probe import describe_dali, gpu_fault

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run all checks and write the file."""
    parser = base_parser(__doc__ or "")
    parser.add_argument("--epochs", type=int, default=20, help="of the memory check")
    parser.add_argument("--no-tests", action="store_true", help="leave the test suite out")
    arguments = parser.parse_args()
    results = Results(arguments)
    results.content["dali"] = describe_dali()
    results.content["gpu_fault"] = str(gpu_fault())
    with Workspace() as work:
        data = copies(arguments.data, work / "plain", arguments.samples)
        checks: dict[str, Callable[[], dict[str, Any]]] = {
            "agreement": lambda: agreement(arguments.data, arguments.device),
            "throughput": lambda: throughput(data, arguments),
            "exact_once": lambda: exact_once(data, arguments),
            "early_ends": lambda: early_ends(data, arguments),
            "train_and_val": lambda: train_and_val(data, arguments),
            "odd_files": lambda: odd_files(arguments.data, work, arguments),
            "streams": lambda: streams(data, arguments),
            "memory": lambda: memory(data, arguments),
            "two_ranks": lambda: two_ranks(data, arguments),
        }
        if not arguments.no_tests:
            checks["tests"] = lambda: gpu_tests(work)
        for name, check in checks.items():
            run(name, check, results)
    failed = [row["check"] for row in results.content["rows"] if not row["ok"]]
    results.content["failed"] = failed
    results.write()
    print("failed:", failed or "none")
    return 1 if failed else 0


def run(name: str, check: Callable[[], dict[str, Any]], results: Results) -> None:
    """Run one check, with what it printed on the process's own stderr (libraries print there)."""
    started = time.perf_counter()
    with stderr_lines() as printed:
        try:
            found, ok = check(), True
        except Exception:
            found, ok = {"traceback": traceback.format_exc()}, False
    lines = printed()
    results.add(
        check=name, ok=ok, seconds=time.perf_counter() - started, stderr_lines=len(lines), stderr=lines[:10], **found
    )


@contextlib.contextmanager
def stderr_lines() -> Iterator[Callable[[], list[str]]]:
    """Divert file descriptor 2 into a file; yields a function that returns its lines after the block."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as diverted:
        os.dup2(diverted.fileno(), 2)
        lines: list[str] = []
        try:
            yield lambda: lines
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            diverted.seek(0)
            lines += diverted.read().decode(errors="replace").splitlines()


def opened(data: Path, arguments: Any, **overrides: Any) -> fastdata.Pipeline:
    """Open the backend on the asked device with a training recipe."""
    settings: dict[str, Any] = {
        "backend": "dali",
        "device": arguments.device,
        "transform": fastdata.imagenet_train(224),
        "batch_size": arguments.batch_size,
        "dtype": "float16",
    }
    return fastdata.open_pipeline(data, **(settings | overrides))


def agreement(data: Path, device: str) -> dict[str, Any]:
    """Compare with the reference on the photographs as they are: train and eval, fast and exact chroma."""
    found: dict[str, Any] = {}
    for stage, transform in (("train", fastdata.imagenet_train(224)), ("eval", fastdata.imagenet_eval(224))):
        expected = _by_id(data, "pil", "cpu", transform, None)
        for name, options in (
            ("fast", fastdata.DaliOptions(chroma="fast")),
            ("whole", fastdata.DaliOptions(chroma="fast", region_decode=False)),
            ("exact", fastdata.DaliOptions(chroma="exact")),
        ):
            images = _by_id(data, "dali", device, transform, options)
            difference = (images.int() - expected.int()).abs()
            means = difference.double().mean(dim=(1, 2, 3))
            found[f"{stage}_{name}"] = {
                "median_of_means": float(means.median()),
                "worst_mean": float(means.max()),
                "largest": int(difference.max()),
            }
    worst = max(line["worst_mean"] for line in found.values())
    if worst > (0.3 if device == "cpu" else 1.0):
        raise AssertionError(f"outside of the contract: {found}")
    return found


def _by_id(data: Path, backend: str, device: str, transform: Any, options: Any) -> torch.Tensor:
    with fastdata.open_pipeline(
        data, backend=backend, device=device, transform=transform, options=options, batch_size=64, dtype="uint8", seed=7
    ) as loader:
        batches = list(loader)
    ids = torch.cat([batch.ids for batch in batches])
    return torch.cat([batch.images.cpu() for batch in batches])[ids.argsort()]


def throughput(data: Path, arguments: Any) -> dict[str, Any]:
    """Return images a second over whole epochs in this process, for each way to decode."""
    found: dict[str, Any] = {}
    for name, options in (
        ("fast", fastdata.DaliOptions(chroma="fast")),
        ("whole", fastdata.DaliOptions(chroma="fast", region_decode=False)),
        ("exact", fastdata.DaliOptions(chroma="exact")),
    ):
        with opened(data, arguments, options=options) as loader:
            _epoch(loader)
            started, images = time.perf_counter(), 0
            while time.perf_counter() - started < arguments.seconds:
                images += _epoch(loader)
            _wait(arguments.device)
            found[name] = images / (time.perf_counter() - started)
            found[f"{name}_details"] = loader.report().details
    return found


def _epoch(loader: fastdata.Pipeline) -> int:
    return sum(len(batch) for batch in loader)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def exact_once(data: Path, arguments: Any) -> dict[str, Any]:
    """Check ids, labels, dtype, layout and device over three epochs."""
    with opened(data, arguments) as loader:
        labels = torch.from_numpy(np.asarray(loader.source.labels))
        for _ in range(3):
            ids: list[int] = []
            for images, found in (batches := iter(loader)):
                assert images.dtype == torch.float16
                assert images.is_contiguous(memory_format=torch.channels_last)
                assert str(images.device) == arguments.device
                assert str(found.device) == arguments.device
                assert torch.isfinite(images).all()
            del batches
            for batch in loader:
                ids += batch.ids.tolist()
                assert torch.equal(batch.labels.cpu(), labels[batch.ids])
            assert sorted(ids) == list(range(len(labels)))
    return {"samples": len(labels)}


def early_ends(data: Path, arguments: Any) -> dict[str, Any]:
    """Break, iterate again, close in the middle, twice; then a fresh pipeline."""
    for _ in range(5):
        with opened(data, arguments) as loader:
            for _ in range(3):
                next(iter(loader))
        loader.close()
    forgotten = opened(data, arguments)
    next(iter(forgotten))
    del forgotten
    gc.collect()
    with opened(data, arguments) as loader:
        assert _epoch(loader) == len(loader.source)
    return {"threads": len(os.listdir("/proc/self/task"))}


def train_and_val(data: Path, arguments: Any) -> dict[str, Any]:
    """Run two pipelines in turn; their batches must be those of each alone."""
    evaluation = {"transform": fastdata.imagenet_eval(224), "shuffle": False}
    with opened(data, arguments, **evaluation) as val:
        alone = [batch.images.sum(dtype=torch.float64).item() for batch in val]
    with opened(data, arguments) as train, opened(data, arguments, **evaluation) as val:
        together = []
        validation = iter(val)
        for _ in train:
            batch = next(validation, None)
            if batch is not None:
                together.append(batch.images.sum(dtype=torch.float64).item())
        together += [batch.images.sum(dtype=torch.float64).item() for batch in validation]
    # Which decoder an engine or a kernel is may differ from run to run, hence no exact equality.
    worst = max(abs(a - b) / (abs(a) + 1.0) for a, b in zip(alone, together, strict=True))
    assert worst < 1e-2, worst
    return {"relative_difference": worst}


def odd_files(photos: Path, work: Path, arguments: Any) -> dict[str, Any]:
    """Epoch speed with 0, 1 and 200 of 1000 files that DALI must not take, and with files that nothing reads."""
    found: dict[str, Any] = {}
    for name, odd, bad in (("odd_0", 0, 0), ("odd_1", 1, 0), ("odd_200", 200, 0), ("bad_20", 0, 20)):
        data = copies(photos, work / name, 1000)
        paths = sorted(path for path in data.rglob("*.jp*g"))
        for path in paths[:: max(1, len(paths) // max(1, odd))][:odd]:
            with Image.open(io.BytesIO(path.read_bytes())) as picture:
                picture.convert("CMYK").save(path, "JPEG", quality=90)
        for number, path in enumerate(paths[:: max(1, len(paths) // max(1, bad))][:bad]):
            path.write_bytes((b"", b"<html>404</html>", path.read_bytes()[:5000])[number % 3])
        with opened(data, arguments, on_error="skip") as loader:
            _epoch(loader)
            started = time.perf_counter()
            delivered = sum(_epoch(loader) for _ in range(3))
            _wait(arguments.device)
            seconds = time.perf_counter() - started
            report = loader.report()
        assert sum(report.fallbacks.values()) == odd, report.fallbacks
        assert len(report.skipped) == bad, report.skipped
        assert delivered == 3 * (1000 - bad)
        found[name] = {
            "images_per_s": delivered / seconds,
            "fallbacks": dict(report.fallbacks),
            "errors": report.details["dali_errors"],
        }
        shutil.rmtree(data)
    return found


def streams(data: Path, arguments: Any) -> dict[str, Any]:
    """Use batches late, on a side stream; sums must equal those of a run that waits after each batch."""
    if arguments.device == "cpu":
        return {"left_out": "no GPU"}
    device = torch.device(arguments.device)

    def sums(*, hurried: bool) -> list[float]:
        side = torch.cuda.Stream(device)
        found = []
        with opened(data, arguments, shuffle=False, options=fastdata.DaliOptions(hw_decoder_load=0.0)) as loader:
            for batch in loader:
                if not hurried:
                    found.append(batch.images.float().sum())
                    torch.cuda.synchronize(device)
                    continue
                side.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(side):
                    torch.cuda._sleep(20_000_000)  # the use comes long after the next batches are made
                    found.append(batch.images.float().sum())
                batch.images.record_stream(side)
                del batch
        torch.cuda.synchronize(device)
        return [value.item() for value in found]

    calm, hurried = sums(hurried=False), sums(hurried=True)
    worst = max(abs(a - b) / (abs(a) + 1.0) for a, b in zip(calm, hurried, strict=True))
    assert worst < 1e-3, (worst, calm, hurried)
    return {"relative_difference": worst}


def memory(data: Path, arguments: Any) -> dict[str, Any]:
    """Return host and GPU memory after each epoch; fails on growth between epoch 5 and the last."""
    marks = []
    with opened(data, arguments) as loader:
        for _ in range(arguments.epochs):
            _epoch(loader)
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            free, total = torch.cuda.mem_get_info(arguments.device) if arguments.device != "cpu" else (0, 0)
            marks.append((round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6), round((total - free) / 1e6)))
    early, late = marks[min(4, len(marks) - 1)], marks[-1]
    assert late[0] <= 1.05 * early[0] + 50, marks
    assert late[1] <= early[1] + 100, marks
    return {"host_and_gpu_mb": marks}


_RANK = """
import sys, json, fastdata
data, rank, batch_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with fastdata.open_pipeline(data, backend="dali", device=f"cuda:{rank}", rank=rank, world_size=2, dtype="float16",
                            transform=fastdata.imagenet_train(224), batch_size=batch_size) as loader:
    ids = []
    for batch in loader:
        assert str(batch.images.device) == f"cuda:{rank}"
        ids += batch.ids.tolist()
    print(json.dumps([len(loader), ids]))
"""


def two_ranks(data: Path, arguments: Any) -> dict[str, Any]:
    """Two processes on two GPUs share an epoch: every id once, equally many steps."""
    if arguments.device == "cpu" or torch.cuda.device_count() < 2:
        return {"left_out": f"{torch.cuda.device_count()} GPUs"}
    import json

    command = [sys.executable, "-c", _RANK, str(data)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(arguments.batch_size)], stdout=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(2)
    ]
    found = [json.loads(rank.communicate(timeout=200)[0].splitlines()[-1]) for rank in ranks]
    assert found[0][0] == found[1][0]
    ids = sorted(found[0][1] + found[1][1])
    assert ids == list(range(len(ids)))
    return {"steps": found[0][0], "samples": len(ids)}


def gpu_tests(work: Path) -> dict[str, Any]:
    """Run the tests that are marked `gpu`; return how each ended."""
    report = work / "junit.xml"
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_dali_*.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    cases = {}
    for case in ElementTree.parse(report).iter("testcase"):
        trouble = [child for child in case if child.tag in ("failure", "error", "skipped")]
        ended = f"{trouble[0].tag}: {(trouble[0].text or trouble[0].get('message') or '')[-1500:]}" if trouble else "ok"
        cases[f"{case.get('classname')}::{case.get('name')}"] = ended
    failed = {name: ended for name, ended in cases.items() if not ended.startswith(("ok", "skipped"))}
    if failed or not cases:
        raise AssertionError(
            f"{len(failed)} of {len(cases)} failed: {failed} {done.stdout[-500:] if not cases else ''}"
        )
    return {"tests": len(cases), "skipped": sum(ended.startswith("skipped") for ended in cases.values())}


if __name__ == "__main__":
    sys.exit(main())
