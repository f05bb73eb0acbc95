"""Two benchmark files: what counts as a change, and what may not be compared."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fastdata.cli import make_app
from fastdata.compare import ComparisonError, compare
from fastdata.report import write_document
from fastdata.spread import TOO_FEW_REPEATS

_spec = importlib.util.spec_from_file_location("report_files", Path(__file__).with_name("test_report.py"))
assert _spec is not None
assert _spec.loader is not None
_report_files = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_report_files)
make_file, make_row = _report_files.make_file, _report_files.make_row

STEADY = (99.0, 99.5, 100.0, 100.5, 101.0)


def two(before: Any, after: Any) -> Any:
    return compare(make_file([before]), make_file([after])).changes[0]


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (STEADY, "same within the spread"),
        ((100.2, 100.7, 101.0, 101.5, 102.0), "same within the spread"),
        ((109.0, 109.5, 110.0, 110.5, 111.0), "faster"),
        ((89.0, 89.5, 90.0, 90.5, 91.0), "slower"),
        ((60.0, 80.0, 90.0, 120.0, 140.0), "same within the spread"),  # 10 % slower, but nobody can tell
        ((50.0,), f"unknown: {TOO_FEW_REPEATS}"),
        (STEADY[:4], f"unknown: {TOO_FEW_REPEATS}"),
    ],
)
def test_a_change_counts_only_beyond_the_spread_of_both_files(after: tuple[float, ...], verdict: str) -> None:
    assert two(make_row(rates=STEADY), make_row(rates=after)).verdict == verdict


def test_the_change_is_that_of_the_medians() -> None:
    change = two(make_row(rates=STEADY), make_row(rates=tuple(1.1 * rate for rate in STEADY)))
    assert change.percent == pytest.approx(10.0)
    assert change.interval_percent[0] < 10.0 < change.interval_percent[1]


def changed(document: Any, *path: str | int, value: Any) -> Any:
    document = copy.deepcopy(document)
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("dataset", "samples"), 999, "data of the two files: samples 1000 and 999"),
        (("dataset", "fingerprint"), "cd" * 16, "fingerprint"),
        (("dataset", "sources", 0, "bytes"), 5, "bytes"),
        (("machine", "cpu"), "another", "machine of the two files: cpu"),
        (("machine", "cpu_cores_available"), 99.0, "cores"),
        (("machine", "gpus"), [{"name": "NVIDIA H200"}], "gpus"),
        (("rows", 0, "cache"), "cold", "cache warm and cold"),
        (("rows", 0, "batch_size"), 32, "at least one row that both files have"),
        (("rows", 0, "dtype"), "uint8", "at least one row"),
        (("rows", 0, "workers"), 3, "at least one row"),
    ],
)
def test_what_does_not_measure_the_same_is_refused(path: tuple[str | int, ...], value: Any, message: str) -> None:
    document = make_file([make_row()])
    with pytest.raises(ComparisonError, match=message):
        compare(document, changed(document, *path, value=value))


def test_rows_that_one_file_lacks_are_named() -> None:
    found = compare(make_file([make_row(), make_row("dali")]), make_file([make_row(), make_row("torchvision")]))
    assert [change.name for change in found.changes] == ["pil · folder"]
    assert [text.split(",")[0] for text in found.unmatched] == [
        "only in the first: dali · folder",
        "only in the second: torchvision · folder",
    ]


def test_training_rows_of_other_models_are_not_the_same_row() -> None:
    other = make_row(mode="train")
    other["training"] = other["training"] | {"model": "resnet50"}
    with pytest.raises(ComparisonError, match="at least one row"):
        compare(make_file([make_row(mode="train")]), make_file([other]))


def test_the_command_tells_the_change_and_fails_on_slower_rows_when_asked(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, scale in zip(paths, (1.0, 0.8), strict=True):
        write_document(make_file([make_row(rates=tuple(scale * rate for rate in STEADY))]), path)
    told = CliRunner().invoke(make_app(), ["compare", *map(str, paths)], env={"COLUMNS": "140"})
    assert told.exit_code == 0
    assert "-20.0 %" in told.output
    assert "slower" in told.output
    assert CliRunner().invoke(make_app(), ["compare", *map(str, paths), "--fail-if-slower"]).exit_code == 1
    assert CliRunner().invoke(make_app(), ["compare", *map(str, reversed(paths)), "--fail-if-slower"]).exit_code == 0


def test_a_gate_does_not_pass_where_too_few_repeats_cannot_tell(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        write_document(make_file([make_row(rates=STEADY[:3])]), path)
    told = CliRunner().invoke(make_app(), ["compare", *map(str, paths)], env={"COLUMNS": "140"})
    assert told.exit_code == 0
    assert "n/a" in told.output
    gate = CliRunner().invoke(make_app(), ["compare", *map(str, paths), "--fail-if-slower"])
    assert gate.exit_code == 1
    assert isinstance(gate.exception, ComparisonError)
    assert TOO_FEW_REPEATS in str(gate.exception)


def shard_sets(**rates: float) -> Any:
    """Return a file whose rows read two or more sets of shards of the same samples."""
    rows = [
        make_row(data=data, source="shards", rates=tuple(rate / 100 * value for value in STEADY))
        for data, rate in rates.items()
    ]
    document = make_file(rows)
    document["dataset"]["sources"] = [
        {"data": data, "kind": "shards", "files": 8, "bytes": 1000 + len(data)} for data in rates
    ]
    return document


def test_two_sets_of_shards_in_one_file_are_compared_each_with_itself() -> None:
    found = compare(shard_sets(plain=100.0, resized=300.0), shard_sets(resized=300.0, plain=50.0))
    assert [(change.name, change.before, change.verdict) for change in found.changes] == [
        ("pil · plain", 100.0, "slower"),
        ("pil · resized", 300.0, "same within the spread"),
    ]
    assert found.unmatched == []


def test_a_set_of_shards_that_one_file_lacks_is_named_by_its_data() -> None:
    found = compare(shard_sets(plain=100.0), shard_sets(plain=100.0, resized=300.0))
    assert [change.name for change in found.changes] == ["pil · plain"]
    assert [text.split(",")[0] for text in found.unmatched] == ["only in the second: pil · resized"]


def test_one_of_two_sets_of_shards_with_other_bytes_is_refused() -> None:
    other = shard_sets(plain=100.0, resized=300.0)
    other["dataset"]["sources"][0]["bytes"] += 1
    with pytest.raises(ComparisonError, match="bytes"):
        compare(shard_sets(plain=100.0, resized=300.0), other)


@pytest.mark.parametrize("caches", [("warm", "cold"), ("cold", "warm")])
def test_warm_and_cold_rows_of_one_file_are_told_apart_in_either_order(caches: tuple[str, str]) -> None:
    both = make_file([make_row(cache=cache) for cache in caches])
    found = compare(both, make_file([make_row(cache="cold")]))
    assert len(found.changes) == 1
    assert [text.rsplit(", ", 1)[1] for text in found.unmatched] == ["warm"]


def test_rows_that_nothing_tells_apart_are_refused_instead_of_one_being_lost() -> None:
    with pytest.raises(ComparisonError, match="the second file: two rows pil · folder"):
        compare(make_file([make_row()]), make_file([make_row(), make_row()]))
