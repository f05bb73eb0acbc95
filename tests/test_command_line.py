"""The command line's errors are one line each, and what it could not write is refused before the work."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

import fastdata
from fastdata.cli import main
from fastdata.outfile import refuse_unwritable, write_whole
from tests.pictures import tree

DENIED = PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    tree(tmp_path / "photos", 2)
    return tmp_path / "photos"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line here; give its exit code and the lines it said on standard error and output."""

    def run(*arguments: object) -> tuple[int, list[str], list[str]]:
        monkeypatch.setattr("sys.argv", ["fastdata", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.err.splitlines(), captured.out.splitlines()

    return run


def raiser(error: BaseException) -> Any:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every measurement and check an error that keeps its traceback."""
    monkeypatch.setattr("fastdata.benchmark.run_benchmark", raiser(AssertionError("measured")))
    monkeypatch.setattr("fastdata.check.check_data", raiser(AssertionError("checked")))


@pytest.mark.parametrize(
    ("command", "option"), [("bench", "--json"), ("bench", "--html"), ("check", "--json")], ids=" ".join
)
@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("{picture}/out", "its folder does not exist"),
        ("{photos}/missing/out", "its folder does not exist"),
        ("{photos}", "a folder; expected a file"),
        ("/proc/out", "cannot be written: "),
    ],
)
def test_a_place_that_cannot_be_written_is_one_line_before_the_work(
    command: str, option: str, place: str, reason: str, photos: Path, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_work(monkeypatch)
    place = place.format(photos=photos, picture=next(photos.glob("*/*")))
    code, errors, _ = said(command, photos, option, place)
    assert code == 2
    (line,) = errors
    assert line.startswith(f"error: {place}: {reason}")


@pytest.mark.parametrize("command", ["bench", "check"])
def test_a_folder_without_permission_is_one_line_before_the_work(
    command: str, photos: Path, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_work(monkeypatch)
    monkeypatch.setattr(tempfile, "TemporaryFile", raiser(DENIED))
    code, errors, _ = said(command, photos, "--json", photos / "out.json")
    assert code == 2
    assert errors == [
        f"error: {photos / 'out.json'}: cannot be written: Permission denied; "
        "expected a file in a folder that can be written to"
    ]


def test_asking_whether_a_file_can_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("kept")
    refuse_unwritable(old, tmp_path / "new.json", None)
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert old.read_text() == "kept"


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")
    monkeypatch.setattr(Path, "replace", raiser(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("a.json", "old")]


def test_links_and_devices_are_written_through_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    refuse_unwritable(tmp_path / "link", Path("/dev/null"))
    write_whole(tmp_path / "link", "text")
    write_whole(Path("/dev/null"), "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"
    assert Path("/dev/null").is_char_device()


def test_findings_are_written_to_a_file_and_to_the_output(photos: Path, tmp_path: Path, said: Any) -> None:
    code, _, output = said("check", photos, "--json", tmp_path / "a.json")
    assert code == 0
    assert output[0].startswith(f"{photos}: 8 pictures, ")
    _, _, printed = said("check", photos, "--json", "-")
    assert json.loads("\n".join(printed)) == json.loads((tmp_path / "a.json").read_text())


@pytest.mark.parametrize("out", ["/proc/x", "/proc/x/y", "{photos}.txt/out"])
def test_shards_that_cannot_be_written_are_one_line(out: str, photos: Path, said: Any) -> None:
    photos.with_suffix(".txt").write_text("a file")
    out = out.format(photos=photos)
    code, errors, _ = said("shard", photos, out)
    assert code == 1
    (line,) = errors
    assert line.startswith(f"error: {out}: cannot be made: ")
    assert line.endswith("; expected a folder for the shards. Choose another.")


def test_a_folder_for_shards_without_permission_is_one_line_and_is_not_left(
    photos: Path, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", raiser(DENIED))
    new, old = photos.with_name("new") / "shards", photos.with_name("old")
    old.mkdir()
    assert "cannot be made: Permission denied" in said("shard", photos, new)[1][0]
    assert "cannot be written to: Permission denied" in said("shard", photos, old)[1][0]
    assert not new.parent.exists()
    assert old.exists()


def test_an_error_of_the_system_is_one_line_with_the_path_and_the_reason(
    photos: Path, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastdata.check.check_data", raiser(OSError(errno.EIO, "Input/output error", "/lost/a.jpg")))
    assert said("check", photos)[:2] == (1, ["error: /lost/a.jpg: Input/output error"])
    monkeypatch.setattr("fastdata.check.check_data", raiser(TimeoutError()))
    assert said("check", photos)[:2] == (1, ["error: TimeoutError"])


def test_an_error_of_the_code_keeps_its_traceback(photos: Path, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdata.check.check_data", raiser(TypeError("ours")))
    with pytest.raises(TypeError, match="ours"):
        said("check", photos)


def test_verifying_a_shard_says_that_the_folder_is_expected(photos: Path, said: Any) -> None:
    out = photos.with_name("shards")
    assert said("shard", photos, out)[0] == 0
    shard = out / "shard-000000.tar"
    assert said("verify", shard)[:2] == (1, [f"error: {shard}: a file; expected the folder of shards"])


def test_a_missing_benchmark_file_is_said_in_words(tmp_path: Path, said: Any) -> None:
    code, errors, _ = said("compare", tmp_path / "a.json", tmp_path / "b.json")
    assert code == 1
    assert errors == [f"error: {tmp_path / 'a.json'}: no such file; expected a file that `fastdata bench --json` wrote"]


def test_the_version_is_printed(said: Any) -> None:
    assert said("--version") == (0, [], [f"fastdata {fastdata.__version__}"])


def test_the_size_is_said_alike_by_all_commands_and_a_rate_only_of_what_was_converted(photos: Path, said: Any) -> None:
    out = photos.with_name("shards")
    _, made, _ = said("shard", photos, out)
    assert "images/s" in made[-1]
    assert float(made[-1].split()[-2]) > 0  # in a unit that leaves digits of it
    size = made[0].rpartition(", ")[2]
    assert size.endswith(" kB")
    code, again, _ = said("shard", photos, out, "--resume")
    assert code == 0
    assert again[0] == made[0]
    assert again[-1].endswith(" s, resumed")
    assert said("verify", out)[2][-1].endswith(size)


def test_a_resume_of_nothing_says_its_rate(photos: Path, said: Any) -> None:
    assert "images/s" in said("shard", photos, photos.with_name("shards"), "--resume")[1][-1]
