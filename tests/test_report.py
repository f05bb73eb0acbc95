"""The benchmark file, the table, the page and the command line that makes them."""

from __future__ import annotations

import copy
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from fastdata.cli import make_app
from fastdata.errors import FastDataError, UsageError
from fastdata.report import REQUIRED_ROW_FIELDS, collect_notes, make_document, read_document, show, write_document
from fastdata.report_html import render_html
from fastdata.spread import MIN_REPEATS, TOO_FEW_REPEATS
from fastdata.training import WAIT_HIDDEN


def make_row(
    backend: str = "pil",
    mode: str = "loader",
    rates: tuple[float, ...] = (98.0, 99.0, 100.0, 102.0, 103.0),
    **changes: Any,
) -> Any:
    row = {
        "backend": backend,
        "mode": mode,
        "data": "photos",
        "source": "folder",
        "order": "full permutation",
        "output": "(n, 3, 224, 224) float32 channels_last on cpu",
        "crops": "RandomResizedCrop(224), mirror",
        "batch_size": 64,
        "device": "cpu",
        "dtype": "float32",
        "workers": 2,
        "world_size": 1,
        "training": None
        if mode == "loader"
        else {
            "model": "resnet18",
            "compiled": False,
            "weights": "float32",
            "memory_format": "channels_last",
            "optimizer": "SGD",
        },
        "images_per_s": sorted(rates)[len(rates) // 2],
        "images_per_s_runs": list(rates),
        "images_per_s_interval": [min(rates), max(rates)] if len(rates) >= MIN_REPEATS else None,
        "cpu_percent": 183.0,
        "other_cpu_percent": 1.0,
        "cpu_cores_available": 2.0,
        "gpu_util_percent": None,
        "gpu_sm_active_percent": None,
        "jpeg_engine_percent": None,
        "gpu_memory_mb": None,
        "gpu_power_w": None,
        "disk_read_mb": 0.0,
        "first_batch_s": 0.8,
        "peak_memory_mb": 600.0,
        "data_wait_percent": 99.0,
        "images": 3000,
        "skipped": 0,
        "fallbacks": {},
        "cache": "warm",
        "cache_note": "",
        "waits": [[0.1, 0.05], [0.2, 0.07], [0.3, 0.01]],
        "share_of_ceiling_percent": 91.5 if mode == "train" else None,
        "reasons": {
            "gpu_util_percent": "NVML does not start: no driver",
            "gpu_power_w": "NVML does not start: no driver",
        },
    }
    return row | changes


def make_file(rows: list[Any], **changes: Any) -> Any:
    document = make_document(
        rows,
        dataset={
            "samples": 1000,
            "fingerprint": "ab" * 16,
            "classes": 8,
            "sources": [{"data": "photos", "kind": "folder", "files": 1000, "bytes": 10**8}],
        },
        device="cpu",
        gpus=1,
        command="fastdata bench photos",
        created="2026-01-01T00:00:00+00:00",
    )
    return copy.deepcopy(document | changes)


class _Page(HTMLParser):
    """Collects tags and what they refer to, and fails on tags that do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(document: Any, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(document, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    document = make_file([make_row(), make_row("dali")])
    write_document(document, tmp_path / "a.json")
    assert read_document(tmp_path / "a.json") == json.loads(json.dumps(document))
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_rows_hold_every_field_of_the_contract() -> None:
    assert REQUIRED_ROW_FIELDS <= make_row().keys()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"schema": 2, "rows": []}', '{"schema": 1, "rows": [{"backend": "pil"}]}']
)
def test_what_is_no_benchmark_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content)
    with pytest.raises(FastDataError, match=r"wrong\.json"):
        read_document(path)


def test_what_cannot_be_read_is_na_in_the_table_and_its_reason_stands_once() -> None:
    text = shown(make_file([make_row(), make_row("torchvision")]), 150)
    assert text.count("n/a") == 2  # GPU % of both rows
    assert text.count("NVML does not start: no driver") == 1
    assert "gpu_util_percent, gpu_power_w: NVML" in text


@pytest.mark.parametrize("width", [80, 160])
def test_every_line_says_warm_or_cold_where_rows_differ_and_no_figure_is_cut(width: int) -> None:
    text = shown(
        make_file([make_row(), make_row("torchvision", cache="cold"), make_row("dali", rates=(12345.0,) * 5)]), width
    )
    lines = [line for line in text.splitlines() if line.lstrip().startswith(("pil ", "torchvision ", "dali "))]
    assert ["warm cache" in line for line in lines] == [True, False, True]
    assert ["cold cache" in line for line in lines] == [False, True, False]
    assert "12,345" in text
    assert "…" not in text


@pytest.mark.parametrize("width", [80, 160])
def test_what_all_rows_share_stands_above_the_table_once(width: int) -> None:
    text = shown(make_file([make_row(), make_row("dali")]), width)
    assert "All rows: folder, loader, warm cache\n" in text
    assert text.count("warm") == text.count("loader") == 1


def test_two_folders_are_told_apart_by_name() -> None:
    text = shown(make_file([make_row(data="photos/[red]"), make_row(data="copies")]), 160)
    assert "pil · photos/[red]" in text
    assert "pil · copies" in text


def test_two_sets_of_shards_are_told_apart_by_name_everywhere() -> None:
    rows = [make_row(), *(make_row(data=data, source="shards", skipped=1) for data in ("plain", "resized"))]
    document = make_file(rows)
    page = _Page()
    page.feed(render_html(document))
    for text in (shown(document, 160), "\n".join(collect_notes(document)), page.text):
        assert "plain" in text
        assert "resized" in text
    assert "photos" not in shown(document, 160)  # the only folder goes by its kind


def test_without_enough_repeats_nothing_looks_like_an_interval() -> None:
    row = make_row(rates=(98.0, 100.0, 103.0))
    row["reasons"] |= {"images_per_s_interval": TOO_FEW_REPEATS, "images_per_s_interval_confidence": TOO_FEW_REPEATS}
    document = make_file([row])
    assert f"- images_per_s_interval: {TOO_FEW_REPEATS}" in shown(document, 160)
    assert "nterval" not in shown(document, 160).replace("images_per_s_interval", "")
    html = render_html(document)
    assert 'class="range"' not in html
    assert html.count('class="dot"') == 3
    assert "images per second, median; dots: repeats" in html
    assert "3 repeats" in html
    assert "interval; dots" not in html


def test_the_table_and_the_page_say_how_sure_an_interval_is() -> None:
    document = make_file([make_row()])
    assert "Interval: of the median over repeats, 94 %." in shown(document, 160)
    assert "line: 94 % interval" in render_html(document)
    document["rows"].append(make_row("dali", rates=tuple(range(100, 107))))
    assert "94-98 %" in shown(document, 160)


def test_training_on_a_gpu_shows_no_share_of_waiting_and_why() -> None:
    hidden = {"data_wait_percent": None, "reasons": {"data_wait_percent": WAIT_HIDDEN}}
    document = make_file([make_row("synthetic", "synthetic", **hidden), make_row("dali", "train", **hidden)])
    text = shown(document, 200)
    assert "wait %" not in text
    assert f"- data_wait_percent: {WAIT_HIDDEN}" in " ".join(text.split())
    assert "Wait for each batch" not in render_html(document)
    document["rows"].append(make_row())
    assert "wait %" in shown(document, 200)
    html = render_html(document)
    assert html.count("<figure") == 1
    assert "Training rows are not drawn" in html


def gpu_rows() -> list[Any]:
    full = {"gpu_util_percent": 88.0, "gpu_sm_active_percent": 71.0, "jpeg_engine_percent": 93.0, "skipped": 12345}
    kinds = ("folder", "shards", "crop-ready shards")
    rates = (123455.0, 123456.0, 123457.0, 123458.0, 123459.0)
    return [
        make_row(backend, mode, rates, source=kind, data=kind, **full)
        for mode in ("loader", "train")
        for kind in kinds
        for backend in ("torchvision", "dali")
    ] + [make_row("synthetic", "synthetic", rates, source="one batch on the device", **full)]


def test_a_full_table_is_readable_at_80_columns() -> None:
    lines = shown(make_file(gpu_rows()), 80).splitlines()
    assert max(map(len, lines)) <= 80
    table = [line for line in lines if "123,457" in line]
    assert len(table) == len(gpu_rows())
    for line in table:  # the first figure's line also names the row: nothing is wrapped letter by letter
        assert line.lstrip().startswith(("torchvision · ", "dali · ", "ceiling (one cached batch)"))
    heading = next(line for line in lines if "img/s" in line)
    assert heading.split() == ["img/s", "of", "ceiling", "CPU", "%", "GPU", "%", "first", "s"]
    assert "also have: interval, SM %, JPEG %, mem MB, wait %, skipped." in " ".join(" ".join(lines).split())


def test_a_wide_terminal_shows_every_column() -> None:
    lines = shown(make_file(gpu_rows()), 160).splitlines()
    heading = next(line for line in lines if "img/s" in line)
    for column in ("interval", "of ceiling", "SM %", "JPEG %", "mem MB", "wait %", "skipped"):
        assert column in heading
    assert max(map(len, lines)) <= 160


def test_notes_name_skips_fallbacks_caches_and_failures() -> None:
    row = make_row(
        skipped=3, fallbacks={"CMYK": 2}, cache_note="asked to be cold, but 40 % stayed", other_cpu_percent=77.0
    )
    document = make_file(
        [row],
        failures=[{"backend": "dali", "data": "photos", "mode": "loader", "error": "no driver"}],
        unavailable=[{"backend": "webdataset", "reason": "not installed"}],
    )
    notes = "\n".join(collect_notes(document))
    for part in (
        "used 77 % CPU during 1 of 1 rows",
        "3 samples skipped",
        "CMYK",
        "asked to be cold",
        "dali on photos (loader) FAILED: no driver",
        "not installed",
    ):
        assert part in notes


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    rows = [
        make_row(),
        make_row("dali", gpu_util_percent=88.0),
        make_row("synthetic", "synthetic", source="one batch on the device"),
        make_row("pil", "train"),
        make_row("my <b>odd</b> & own", "train", rates=(50.0,)),
    ]
    html = render_html(make_file(rows))
    page = _Page()
    page.feed(html)
    page.close()
    assert page.open == []
    assert page.references == []
    assert not re.search(r"https?://|url\(|@import|<script|<link|<iframe", html)
    for part in ("91.5 %", "n/a", "one cached batch", "resnet18", "my <b>odd</b> & own", "98-103", "no driver"):
        assert part in page.text
    assert 'name="viewport"' in html
    assert "prefers-color-scheme: dark" in html


def test_a_share_of_the_ceiling_that_was_withheld_is_explained_below_the_table() -> None:
    reason = {"share_of_ceiling_percent": "above 105 %: the ceiling was disturbed, or measured too slow"}
    loader_reason = {"share_of_ceiling_percent": "only training rows have a ceiling"}
    document = make_file(
        [
            make_row("synthetic", "synthetic"),
            make_row("pil", "train", share_of_ceiling_percent=None, reasons=reason),
            make_row("pil", "loader", reasons=loader_reason),
        ]
    )
    text = shown(document, 150)
    assert "- share_of_ceiling_percent: above 105 %: the ceiling was disturbed, or measured too slow" in text
    assert "only training rows" not in text
    assert "withheld above 105 %" in " ".join(document["method"])


def test_a_disturbance_stands_above_the_figures_of_the_page() -> None:
    html = render_html(make_file([make_row(other_cpu_percent=150.0)]))
    assert html.index("other processes used 150 % CPU") < html.index("<section>")
    assert "img/s: other processes used" not in render_html(make_file([make_row(other_cpu_percent=1.0)]))


def test_the_page_of_failures_alone_is_a_page() -> None:
    html = render_html(make_file([], failures=[{"backend": "pil", "data": "p", "mode": "loader", "error": "broken"}]))
    assert "broken" in html


def photo_folder(root: Path, count: int = 12) -> Path:
    for number in range(count):
        folder = root / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((80, 60), 60).convert("RGB").save(folder / f"{number:02d}.jpg")
    return root


def test_the_command_measures_and_writes_both_files(tmp_path: Path) -> None:
    folder = photo_folder(tmp_path / "photos")
    json_file, html_file = tmp_path / "out.json", tmp_path / "out.html"
    arguments = ["bench", str(folder), "--backend", "pil", "--repeats", "2", "--seconds", "0.3", "--min-batches", "3"]
    arguments += ["--batch-size", "4", "--size", "32", "--workers", "1", "--device", "cpu"]
    result = CliRunner().invoke(make_app(), [*arguments, "--json", str(json_file), "--html", str(html_file)])
    assert result.exit_code == 0, result.output
    document = read_document(json_file)
    (row,) = document["rows"]
    assert row["backend"] == "pil"
    assert row["source"] == "folder"
    assert row["images_per_s"] > 0
    assert row["cpu_percent"] > 0
    assert row["epoch_ends"] > 0
    assert row["gpu_util_percent"] is None
    assert document["dataset"]["samples"] == 12
    assert "pil" in html_file.read_text()
    assert "All rows: folder, loader, warm cache" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere"),
        (["{folder}", "--backend", "pill"], "pil"),
        (
            ["{folder}", "--backend", "webdataset", "--device", "cpu"],
            "webdataset: it reads shards, {folder} is a folder: convert the folder with `fastdata shard`",
        ),
        (["{folder}", "--json", "{folder}/missing/out.json"], "does not exist"),
        (["{folder}", "--backend", "pil", "--device", "cuda:7"], "--device"),
        (["{folder}", "--backend", "pil", "--device", "cpu", "--dtype", "float8"], "--dtype: 'float8'"),
        (["{folder}", "--backend", "pil", "--device", "cpu", "--model", "resnet51"], "--model: 'resnet51'"),
        (["{folder}", "{other}", "--backend", "pil", "--device", "cpu"], "the same samples"),
    ],
)
def test_impossible_requests_are_named_before_anything_is_measured(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    places = {"folder": photo_folder(tmp_path / "photos", 4), "other": photo_folder(tmp_path / "other", 6)}
    result = CliRunner().invoke(make_app(), ["bench", *(argument.format(**places) for argument in arguments)])
    assert isinstance(result.exception, FastDataError | UsageError)
    assert message.format(**places) in str(result.exception)


def test_backends_are_listed_with_what_is_missing() -> None:
    result = CliRunner().invoke(make_app(), ["backends"])
    assert result.exit_code == 0
    assert "torchvision" in result.output
