"""Conversions that are killed, interrupted, started twice, and resumed: nothing is lost, nothing is mixed."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from fastdata.errors import ShardError
from fastdata.shards import ConvertOptions, convert_folder
from fastdata.shards import workfolder as workfolder_module
from fastdata.shards.workfolder import WorkFolder
from fastdata.sources.open import open_source
from fastdata.sources.shardindex import WORK_NAME
from fastdata.sources.tar import open_shards
from tests.pictures import flat, tree

CAP = 10_240  # three of these samples a shard
OPTIONS = ConvertOptions(max_bytes=CAP)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 180 pictures in 4 classes: 60 shards."""
    root = tmp_path_factory.mktemp("many") / "tree"
    picture = flat((10, 200, 30))
    for i in range(180):
        path = root / "abcd"[i % 4] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture)
    return root


@pytest.fixture(scope="module")
def clean(folder: Path) -> dict[str, str]:
    """Return the digest of each file of a conversion that nothing disturbed."""
    convert_folder(folder, folder.parent / "clean", OPTIONS)
    return digests(folder.parent / "clean")


def digests(out: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


def start(folder: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fastdata", "shard", str(folder), str(out), "--max-bytes", str(CAP), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def count_shards(out: Path) -> int:
    try:
        return sum(name.endswith(".tar") for name in os.listdir(out))
    except FileNotFoundError:  # not made yet, or only tried
        return 0


def wait_for_shards(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    while count_shards(out) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def check_named_shards_are_whole(out: Path, clean: dict[str, str]) -> list[Path]:
    shards = sorted(out.glob("*.tar"))
    for number, path in enumerate(shards):
        assert path.name == f"shard-{number:06d}.tar"
        assert hashlib.sha256(path.read_bytes()).hexdigest() == clean[path.name]
        with tarfile.open(path) as tar:
            assert len(tar.getnames()) % 2 == 0
    return shards


@pytest.mark.parametrize("shards", [2, 15])
def test_a_killed_conversion_leaves_whole_shards_and_is_resumed(
    folder: Path, clean: dict[str, str], tmp_path: Path, shards: int
) -> None:
    """B66, B68."""
    out = tmp_path / "out"
    process = start(folder, out)
    wait_for_shards(out, shards, process)
    process.kill()
    process.communicate()
    finished = check_named_shards_are_whole(out, clean)
    assert shards <= len(finished) < 60
    for data in (out, out / "shard-*.tar", [str(finished[0])]):
        with pytest.raises(ShardError, match=r"unfinished conversion.*--resume"):
            open_source(data)
    times = {path: path.stat().st_mtime_ns for path in finished}
    with pytest.raises(ShardError, match="--resume to finish it, or --overwrite"):
        convert_folder(folder, out, OPTIONS)
    convert_folder(folder, out, OPTIONS, resume=True)
    assert digests(out) == clean
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_conversion_killed_again_and_again_is_finished_by_resumes(
    folder: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    out, chance = tmp_path / "out", random.Random(1)
    for attempt in range(3):
        process = start(folder, out, *(["--resume"] if attempt else []))
        before = count_shards(out)
        wait_for_shards(out, before + 1, process)
        time.sleep(chance.random() * 0.05)
        process.kill()
        process.communicate()
        check_named_shards_are_whole(out, clean)
    convert_folder(folder, out, OPTIONS, resume=True)
    assert digests(out) == clean


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_at_once_and_loses_nothing(
    folder: Path, clean: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    """B101."""
    out = tmp_path / "out"
    process = start(folder, out)
    wait_for_shards(out, 3, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=10)
    assert process.returncode in (130, 143, -number)
    assert errors.count("Traceback") == 0
    check_named_shards_are_whole(out, clean)
    convert_folder(folder, out, OPTIONS, resume=True)
    assert digests(out) == clean


@pytest.mark.parametrize("step", ["record", "publish", "index", "remove"])
def test_a_stop_between_any_two_steps_is_resumed(
    folder: Path, clean: dict[str, str], tmp_path: Path, step: str
) -> None:
    """The process ends itself, as if killed, at a step's third (or only) turn."""
    code = f"""
import os, sys
from fastdata.shards import ConvertOptions, convert_folder, convert, pack, shardfile, workfolder
def end_at(owner, name, turn):
    real, turns = getattr(owner, name), []
    def ending(*arguments, **more):
        turns.append(1)
        if len(turns) == turn:
            os._exit(9)
        return real(*arguments, **more)
    setattr(owner, name, ending)
owner, name, turn = {{
    "record": (workfolder.WorkFolder, "keep_record", 3), "publish": (shardfile.ShardFile, "publish", 3),
    "index": (convert, "publish_split", 1), "remove": (workfolder.WorkFolder, "remove", 1)}}[{step!r}]
end_at(owner, name, turn)
convert_folder(sys.argv[1], sys.argv[2], ConvertOptions(max_bytes={CAP}))
"""
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", code, folder, out], check=False)
    assert done.returncode == 9
    with pytest.raises(ShardError, match="unfinished"):
        open_shards(out)
    convert_folder(folder, out, OPTIONS, resume=True)
    assert digests(out) == clean


def test_a_resumed_split_equals_one_that_was_never_stopped(tmp_path: Path) -> None:
    tree(tmp_path / "tree", 20)
    options = ConvertOptions(max_bytes=CAP, split=(("train", 0.7), ("val", 0.3)), on_error="skip")
    for name in ("ant/0003.JPEG", "dog/0019.JPEG"):
        (tmp_path / "tree" / name).write_bytes(b"")
    convert_folder(tmp_path / "tree", tmp_path / "clean", options)
    code = f"""
import os, sys
from fastdata.shards import ConvertOptions, convert_folder, workfolder
real, turns = workfolder.WorkFolder.keep_record, []
def ending(self, split, number, record):
    if split == "val" and number == 3:
        os._exit(9)
    real(self, split, number, record)
workfolder.WorkFolder.keep_record = ending
options = ConvertOptions(max_bytes={CAP}, split=(("train", 0.7), ("val", 0.3)), on_error="skip")
convert_folder(sys.argv[1], sys.argv[2], options)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "tree", tmp_path / "out"], check=False)
    assert done.returncode == 9
    for opened in (tmp_path / "out" / "train", tmp_path / "out" / "val"):
        with pytest.raises(ShardError, match="unfinished"):
            open_shards(opened)
    result = convert_folder(tmp_path / "tree", tmp_path / "out", options, resume=True)
    assert sum(split.skipped for split in result.splits) == 2
    for name in ("train", "val"):
        assert digests(tmp_path / "out" / name) == digests(tmp_path / "clean" / name)


def stopped(
    folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch, options: ConvertOptions = OPTIONS, shards: int = 3
) -> None:
    """Leave an unfinished conversion with some shards."""
    real = WorkFolder.keep_record

    def keep_record(self: WorkFolder, split: str, number: int, record: workfolder_module.ShardRecord) -> None:
        if number == shards:
            raise KeyboardInterrupt
        real(self, split, number, record)

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "keep_record", keep_record)
        with pytest.raises(KeyboardInterrupt):
            convert_folder(folder, out, options)
    assert len(list(out.glob("*.tar"))) == shards


def test_a_resume_with_other_options_or_another_folder_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    stopped(folder, out, monkeypatch)
    before = digests_below(out)
    with pytest.raises(ShardError, match="seed was 0, is 1"):
        convert_folder(folder, out, ConvertOptions(max_bytes=CAP, seed=1), resume=True)
    tree(tmp_path / "tree", 3)
    with pytest.raises(ShardError, match="the source folder changed since"):
        convert_folder(tmp_path / "tree", out, OPTIONS, resume=True)
    assert digests_below(out) == before


def digests_below(out: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("change", ["content", "time", "repaired"])
def test_a_resume_makes_shards_again_whose_files_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    paths = tree(tmp_path / "tree", 9)
    paths[20].write_bytes(b"")  # left out by the first run
    options = ConvertOptions(max_bytes=CAP, on_error="skip", shuffle=False)
    out = tmp_path / "out"
    stopped(tmp_path / "tree", out, monkeypatch, options, shards=8)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    if change == "content":
        size = paths[13].stat().st_size
        paths[13].write_bytes(flat((1, 2, 3)).ljust(size, b"\0"))
    elif change == "time":
        os.utime(paths[13], ns=(10**18, 10**18))
    else:
        paths[20].write_bytes(flat((1, 2, 3)))
    convert_folder(tmp_path / "tree", out, options, resume=True)
    convert_folder(tmp_path / "tree", tmp_path / "fresh", options)
    assert digests(out) == digests(tmp_path / "fresh")
    kept = [name for name, written_ns in before.items() if (out / name).stat().st_mtime_ns == written_ns]
    assert sorted(kept) == [f"shard-{number:06d}.tar" for number in range(6 if change == "repaired" else 4)]


def test_a_shard_that_lost_its_end_while_nobody_looked_is_made_again(
    folder: Path, clean: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    stopped(folder, out, monkeypatch)
    os.truncate(out / "shard-000001.tar", 1000)
    convert_folder(folder, out, OPTIONS, resume=True)
    assert digests(out) == clean


def test_a_resume_makes_a_finished_shard_again_that_holds_other_bytes(
    folder: Path, clean: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    stopped(folder, out, monkeypatch, shards=4)
    damaged = out / "shard-000002.tar"
    data = bytearray(damaged.read_bytes())
    data[700] ^= 1
    damaged.write_bytes(data)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    convert_folder(folder, out, OPTIONS, resume=True)
    assert digests(out) == clean
    kept = [name for name, written_ns in before.items() if (out / name).stat().st_mtime_ns == written_ns]
    assert sorted(kept) == ["shard-000000.tar", "shard-000001.tar"]


@pytest.mark.parametrize("plan", [b"", b'{"options": {"spl', b"\xff\xfe", b"[]", b'{"options": 3}'])
def test_a_damaged_plan_is_named_by_a_resume_and_replaced_by_an_overwrite(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: bytes
) -> None:
    out = tmp_path / "out"
    stopped(folder, out, monkeypatch)
    (out / WORK_NAME / "plan.json").write_bytes(plan)
    before = digests_below(out)
    for resume in (True, False):
        with pytest.raises(ShardError, match=r"plan\.json: an unreadable plan.*Start anew with --overwrite\."):
            convert_folder(folder, out, OPTIONS, resume=resume)
    assert digests_below(out) == before
    convert_folder(folder, out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["classes.json", "index.fastdata", "shard-000000.tar"]


def test_overwriting_a_set_whose_plan_is_damaged_removes_the_shards_of_its_splits(folder: Path, tmp_path: Path) -> None:
    code = f"""
import os, sys
from fastdata.shards import ConvertOptions, convert, convert_folder
convert.publish_split = lambda *_: os._exit(9)
convert_folder(sys.argv[1], sys.argv[2], ConvertOptions(max_bytes={CAP}, split=(("train", 0.5), ("val", 0.5))))
"""
    out = tmp_path / "out"
    assert subprocess.run([sys.executable, "-c", code, folder, out], check=False).returncode == 9
    assert {path.parent.name for path in out.rglob("*.tar")} == {"train", "val"}
    (out / WORK_NAME / "plan.json").write_text("")
    convert_folder(folder, out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["classes.json", "index.fastdata", "shard-000000.tar"]


def test_overwriting_an_unfinished_set_starts_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    stopped(folder, out, monkeypatch)
    convert_folder(folder, out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["classes.json", "index.fastdata", "shard-000000.tar"]


def test_a_second_converter_on_the_same_folder_stops(folder: Path, clean: dict[str, str], tmp_path: Path) -> None:
    """B70: two started at the same moment; then one that starts while another is at work."""
    out = tmp_path / "out"
    both = [start(folder, out) for _ in range(2)]
    messages = [process.communicate(timeout=100)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 1]
    loser = messages[codes.index(1)]
    assert "another process converts into this folder" in loser or "it holds shards already" in loser
    assert digests(out) == clean


@pytest.mark.parametrize("more", [{}, {"resume": True}, {"overwrite": True}])
def test_a_locked_folder_is_refused_and_not_touched(folder: Path, tmp_path: Path, more: dict[str, bool]) -> None:
    out = tmp_path / "out"
    with WorkFolder(out) as work:
        work.start({"options": {"split": []}})
        before = digests_below(out)
        with pytest.raises(ShardError, match="another process converts into this folder"):
            convert_folder(folder, out, OPTIONS, **more)
        assert digests_below(out) == before
    assert (out / WORK_NAME).exists()
