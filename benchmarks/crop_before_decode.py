"""Measures crop before decode on a folder of JPEGs: header, cut, decode, transcoding, and the choice of interval.

``python benchmarks/crop_before_decode.py photos/train``. Times are CPU time of the calling thread, median over the
repeats with all sides interleaved, so other programs on the machine disturb them little. Windows are those of a random
resized crop (scale 0.08 to 1, ratio 3/4 to 4/3). With ``--jpegtran`` the same files are also rewritten by that program
of libjpeg-turbo, and by the transcoder from the progressive and arithmetic-coded forms that it makes of them.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from fastdata import jpeg, jpeg_cut, transcode
from fastdata._native import locate

CHUNK = 16
"""Files that a host loader's thread cuts in one call."""
Window = tuple[int, int, int, int]


def random_window(rng: random.Random, width: int, height: int) -> Window:
    """Draw top, left, height and width as a random resized crop does."""
    while True:
        area = width * height * rng.uniform(0.08, 1)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return rng.randint(0, height - h), rng.randint(0, width - w), h, w


def measure(sides: dict[str, Callable[[], object]], files: int, repeats: int) -> dict[str, float]:
    """Return the median microseconds a file of each side."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run()
    for _ in range(repeats):
        for name, run in sides.items():
            started = time.thread_time()
            run()
            times[name].append((time.thread_time() - started) / files * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def intervals(header: jpeg.JpegHeader) -> dict[str, int]:
    """Return the restart interval of a picture by each rule."""
    columns = -(-header.width // header.mcu_width)
    divisors = [d for d in range(1, columns + 1) if columns % d == 0]
    return {
        "1": 1,
        "smallest divisor >= 2": next((d for d in divisors if d >= 2), 1),
        "smallest divisor >= 3": next((d for d in divisors if d >= 3), 1),
        "chosen": transcode.restart_intervals(header)[0],
        "a whole row": columns,
    }


def rows_of_intervals(originals: list[bytes], windows: list[Window], repeats: int) -> None:
    """Print size and decode time of cuts by interval."""
    headers = [jpeg.read_header(one) for one in originals]
    total = sum(map(len, originals))
    cuts, facts = {}, {}
    for rule in intervals(headers[0]):
        ready = []
        for one, header in zip(originals, headers, strict=True):
            interval = intervals(header)[rule]
            ready.append(
                transcode.make_crop_ready(one, max_growth=9.0, check="none", restart_interval=interval).data or one
            )
        cuts[rule] = [bytes(jpeg_cut.cut(one, window)[0]) for one, window in zip(ready, windows, strict=True)]
        grown = [len(a) / len(b) - 1 for a, b in zip(ready, originals, strict=True)]
        facts[rule] = (
            sum(map(len, ready)) / total - 1,
            sum(g > 0.15 for g in grown),
            sum(map(len, cuts[rule])) / total,
        )
    cuts["not cut"] = originals
    facts["not cut"] = (0.0, 0, 1.0)
    decode = measure({rule: _decoder(files) for rule, files in cuts.items()}, len(originals), repeats)
    print("interval                  growth   over 15 %   bytes left   decode us")
    for rule, (growth, over, left) in facts.items():
        print(f"{rule:24} {growth:7.1%} {over:11} {left:12.1%} {decode[rule]:11.0f}")


def _decoder(files: list[bytes]) -> Callable[[], object]:
    return lambda: [simplejpeg.decode_jpeg(one) for one in files]


def rows_of_steps(originals: list[bytes], ready: list[bytes], windows: list[Window], repeats: int) -> None:
    """Print the time of each step."""
    views = [memoryview(one) for one in ready]
    chunks = [(views[i : i + CHUNK], np.array(windows[i : i + CHUNK])) for i in range(0, len(views), CHUNK)]
    scratch: NDArray[np.uint8] = np.empty(CHUNK * max(map(len, ready)), np.uint8)
    times = measure(
        {
            "addresses (holds the GIL)": lambda: locate(views),
            "addresses and headers, a batch": lambda: jpeg.read_headers(views),
            "header, one file": lambda: [jpeg.read_header(one) for one in views],
            "header and cut, 16 at a time": lambda: [
                jpeg_cut.cut_all(jpeg_cut.locate_files(chunk), places, scratch) for chunk, places in chunks
            ],
            "header and cut, one file": lambda: [
                jpeg_cut.cut(one, window, scratch) for one, window in zip(views, windows, strict=True)
            ],
            "transcode, no check": lambda: [transcode.make_crop_ready(one, check="none") for one in originals],
            "transcode, coefficients": lambda: [transcode.make_crop_ready(one) for one in originals],
            "transcode, pixels": lambda: [transcode.make_crop_ready(one, check="pixels") for one in originals],
        },
        len(originals),
        repeats,
    )
    print("step                                  us")
    for name, value in times.items():
        print(f"{name:32} {value:9.2f}")


def rows_of_forms(originals: list[bytes], jpegtran: str, repeats: int) -> None:
    """Print how long the transcoder takes from each form that a JPEG may have."""
    forms = {"baseline": [], "progressive": ["-progressive"], "arithmetic": ["-arithmetic"]}
    forms["arithmetic, progressive"] = ["-arithmetic", "-progressive"]
    files = {
        form: [
            subprocess.run([jpegtran, *options, "-copy", "all"], input=one, capture_output=True, check=True).stdout
            for one in originals
        ]
        for form, options in forms.items()
    }
    times = measure({form: _transcoder(some) for form, some in files.items()}, len(originals), repeats)
    print("transcode from, no check              us    files/s    left as they are")
    for form, some in files.items():
        left = sum(transcode.make_crop_ready(one, check="none").data is None for one in some)
        print(f"{form:32} {times[form]:9.0f} {1e6 / times[form]:9.0f} {left:12}")


def _transcoder(files: list[bytes]) -> Callable[[], object]:
    return lambda: [transcode.make_crop_ready(one, check="none") for one in files]


def rows_of_jpegtran(originals: list[bytes], jpegtran: str, repeats: int) -> None:
    """Print wall and CPU time a file of jpegtran, started once a file as is its use, and of the transcoder."""
    restarts = [f"{transcode.restart_intervals(jpeg.read_header(one))[0]}B" for one in originals]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i}.jpg" for i in range(len(originals))]
        for path, one in zip(paths, originals, strict=True):
            path.write_bytes(one)
        target = Path(folder) / "out.jpg"

        def run_program(options: list[str], with_restarts: bool) -> int:
            size = 0
            for path, restart in zip(paths, restarts, strict=True):
                extra = ["-restart", restart] if with_restarts else []
                subprocess.run([jpegtran, *options, *extra, "-outfile", target, path], check=True)
                size += target.stat().st_size
            return size

        def run_transcoder(check: transcode.Check) -> int:
            size = 0
            for path in paths:
                made = transcode.make_crop_ready(path.read_bytes(), check=check, max_growth=9.0).data
                assert made is not None
                target.write_bytes(made)
                size += len(made)
            return size

        sides: dict[str, Callable[[], int]] = {
            "jpegtran -copy none": lambda: run_program(["-copy", "none"], False),
            "jpegtran -copy none -optimize -restart NB": lambda: run_program(["-copy", "none", "-optimize"], True),
            "transcode, no check": lambda: run_transcoder("none"),
            "transcode, coefficients": lambda: run_transcoder("coefficients"),
        }
        whole = sum(map(len, originals))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        growth = {name: run() / whole - 1 for name, run in sides.items()}
        for _ in range(repeats):
            for name, run in sides.items():
                wall, cpu = time.perf_counter(), _cpu_s()
                run()
                times[name].append((time.perf_counter() - wall, _cpu_s() - cpu))
    print("file to file                                   wall us     CPU us    growth")
    for name, pairs in times.items():
        wall, cpu = (statistics.median(values) / len(originals) * 1e6 for values in zip(*pairs, strict=True))
        print(f"{name:44} {wall:9.0f} {cpu:10.0f} {growth[name]:+9.1%}")


def _cpu_s() -> float:
    """Return the CPU time of this process and of those that it ran."""
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="class folders of JPEGs")
    parser.add_argument("--files", type=int, default=256, help="how many of them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jpegtran", action="store_true", help="compare with jpegtran, which has to be installed")
    options = parser.parse_args()
    jpegtran = shutil.which("jpegtran") if options.jpegtran else None
    if options.jpegtran and jpegtran is None:
        parser.error("jpegtran is not installed: it comes with libjpeg-turbo (libjpeg-turbo-progs on Debian)")
    paths = sorted(p for p in options.folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))[: options.files]
    originals, ready, left = [], [], []
    for path in paths:
        data = path.read_bytes()
        result = transcode.make_crop_ready(data)
        if result.data is None:
            left.append(f"{path}: {result.reason}")
        else:
            originals.append(data)
            ready.append(result.data)
    rng = random.Random(0)
    headers = [jpeg.read_header(one) for one in ready]
    windows = [random_window(rng, header.width, header.height) for header in headers]
    growth = sum(map(len, ready)) / sum(map(len, originals)) - 1
    print(f"{len(ready)} files of {np.mean([len(o) for o in originals]):,.0f} bytes; crop-ready {growth:+.1%}")
    print(*(f"left as it is: {line}" for line in left), sep="\n", end="\n" if left else "")
    rows_of_steps(originals, ready, windows, options.repeats)
    rows_of_intervals(originals, windows, options.repeats)
    if jpegtran is not None:
        rows_of_forms(originals, jpegtran, options.repeats)
        rows_of_jpegtran(originals, jpegtran, options.repeats)


if __name__ == "__main__":
    main()
