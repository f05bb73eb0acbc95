"""`fastdata check` names what would go wrong before anyone trains on a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastdata.check import CheckReport, check_data
from fastdata.errors import SourceError
from fastdata.shards import convert_folder
from tests import pictures
from tests.test_shards_verify import run


def kinds(report: CheckReport) -> dict[str, list[str]]:
    """Return the base names of each kind."""
    found: dict[str, list[str]] = {}
    for finding in report.findings:
        found.setdefault(finding.kind, []).append(Path(finding.path).name)
    return found


def write(root: Path, **files: bytes) -> Path:
    folder = root / "ant"
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data)
    return root


def test_a_plain_folder_has_nothing_to_remark(tmp_path: Path) -> None:
    pictures.tree(tmp_path, 3)
    report = check_data(tmp_path)
    assert (report.ok, report.findings, report.files) == (True, (), 12)
    assert report.classes == dict.fromkeys(pictures.CLASSES, 3)
    assert report.types == {"jpg": 12}
    assert report.size_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.JPEG"))


def test_unreadable_files_are_exactly_those_that_the_reference_refuses(tmp_path: Path) -> None:
    """B09, B15, B17, B21."""
    bad = {
        "zero__jpg": b"",
        "page__jpg": b"<html>404</html>",
        "soi__jpg": b"\xff\xd8",
        "half__jpg": pictures.cut(0.5),
        "most__jpg": pictures.cut(0.9),
        "half_progressive__jpg": pictures.cut(0.5, progressive=True),
        "twelve__jpg": pictures.twelve_bit(),
        "lossless__jpg": pictures.lossless(),
        "claims__jpg": pictures.claiming(),
    }
    good = {
        "fine__jpg": pictures.noise(),
        "padded__jpg": pictures.noise() + bytes(1000),
        "gray__jpg": pictures.gray(77),
        "two__JPG": pictures.two_pictures(),
    }
    report = check_data(write(tmp_path, **bad, **good))
    assert kinds(report)["unreadable"] == sorted(name.replace("__", ".") for name in bad)
    assert not report.ok
    assert all(finding.detail for finding in report.findings)


def test_odd_files_are_named_by_kind(tmp_path: Path) -> None:
    """B01, B03, B08, B14, B27."""
    report = check_data(
        write(
            tmp_path,
            named__jpg=pictures.flat((1, 2, 3), kind="PNG"),
            cmyk__jpg=pictures.cmyk(),
            deep__png=pictures.gray_16_bit(),
            alpha__png=pictures.hidden_red(),
            palette__png=pictures.palette(),
            turned__jpg=pictures.oriented(6),
            tiny__jpg=pictures.flat((1, 2, 3), (8, 40)),
            progressive__jpg=pictures.noise(progressive=True),
        )
    )
    found = kinds(report)
    assert report.ok
    assert found["mislabelled"] == ["named.jpg"]
    assert found["odd colour"] == ["alpha.png", "cmyk.jpg", "deep.png", "palette.png"]
    assert found["turned"] == ["turned.jpg"]
    assert "tiny.jpg" in found["tiny"]
    assert found["slow path"] == ["alpha.png", "cmyk.jpg", "deep.png", "named.jpg", "palette.png"]
    assert report.types == {"png": 4, "jpg": 3, "progressive jpg": 1}


def test_same_names_with_other_extensions_are_named(tmp_path: Path) -> None:
    report = check_data(
        write(tmp_path, a__jpg=pictures.gray(1), a__png=pictures.gray(1, kind="PNG"), b__jpg=pictures.gray(1))
    )
    assert kinds(report)["same name twice"] == ["a.png"]


def test_a_class_without_pictures_is_named(tmp_path: Path) -> None:
    """B43: opening the folder refuses it, the check says so beside all else."""
    pictures.tree(tmp_path, 1)
    (tmp_path / "eel").mkdir()
    report = check_data(tmp_path)
    assert not report.ok
    assert kinds(report) == {"class without pictures": ["eel"]}
    assert report.classes["eel"] == 0


def test_junk_is_counted(tmp_path: Path) -> None:
    """B41, B46."""
    pictures.tree(tmp_path, 1)
    for name in (".DS_Store", "Thumbs.db", "ant/notes.txt", "ant/._0000.JPEG"):
        (tmp_path / name).write_bytes(b"x")
    assert check_data(tmp_path).ignored == {"hidden": 2, "system files": 1, "not pictures": 1}


def test_flat_folders_and_shards_are_checked_too(tmp_path: Path) -> None:
    write(tmp_path / "tree", a__jpg=pictures.noise(), b__jpg=pictures.oriented(3))
    assert check_data(tmp_path / "tree" / "ant").files == 2
    convert_folder(tmp_path / "tree", tmp_path / "out")
    report = check_data(tmp_path / "out")
    assert (report.files, report.classes) == (2, {"ant": 2})
    (finding,) = report.findings
    assert finding.kind == "turned"
    assert finding.path.endswith("shard-000000.tar member 000000001.jpg")


def test_the_result_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    paths = pictures.tree(tmp_path, 10)
    for path in paths[::7]:
        path.write_bytes(b"x")
    assert check_data(tmp_path, workers=1) == check_data(tmp_path, workers=7)


def test_nothing_to_check_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such folder"):
        check_data(tmp_path / "nowhere")
    with pytest.raises(SourceError, match="no pictures"):
        check_data(tmp_path)


def test_the_command_writes_json_and_exits_with_1_where_files_are_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "tree", **{f"bad{i}__jpg": b"" for i in range(7)}, good__jpg=pictures.gray(5))
    assert run(monkeypatch, "check", tmp_path / "tree", "--json", tmp_path / "report.json") == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["schema"], report["ok"], report["files"]) == (1, False, 8)
    assert len([f for f in report["findings"] if f["kind"] == "unreadable"]) == 7
    text = capsys.readouterr().out
    assert "unreadable: 7" in text
    assert "and 2 more" in text
    assert run(monkeypatch, "check", tmp_path / "tree", "--json", "-") == 1
    assert json.loads(capsys.readouterr().out) == report
