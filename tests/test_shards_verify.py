"""Verification names every missing, cut, zeroed, altered or surplus shard and member."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from fastdata.errors import ShardError
from fastdata.shards import ConvertOptions, convert_folder
from fastdata.shards.verify import verify_shards
from fastdata.sources.shardindex import INDEX_NAME, WORK_NAME
from fastdata.sources.tar import TarSource, open_shards
from tests.pictures import tree


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return 14 shards of three samples; the last holds one."""
    tree(tmp_path / "tree", 10)
    convert_folder(tmp_path / "tree", tmp_path / "out", ConvertOptions(max_bytes=10_240))
    return tmp_path / "out"


def faults(out: Path) -> list[str]:
    return [str(fault) for fault in verify_shards(out).faults]


def patch(source: TarSource, position: int, at: int, data: bytes) -> tuple[str, str]:
    """Overwrite bytes, counted from the start of a sample's picture; return shard and key."""
    info = source.index.shards[int(source.index.columns["shard"][position])]
    with open(info.name, "r+b") as file:
        file.seek(int(source.index.columns["offset"][position]) + at)
        file.write(data)
    return os.path.basename(info.name), f"{int(source.ids[position]):09d}"


def test_a_set_as_it_was_written_has_no_fault(out: Path) -> None:
    result = verify_shards(out, workers=3)
    assert result.faults == ()
    assert (result.samples, result.shards) == (40, 14)
    assert result.size_bytes == sum(path.stat().st_size for path in out.glob("*.tar"))


def test_splits_are_verified_together(tmp_path: Path) -> None:
    tree(tmp_path / "tree", 10)
    convert_folder(tmp_path / "tree", tmp_path / "out", ConvertOptions(split=(("train", 0.5), ("val", 0.5))))
    assert verify_shards(tmp_path / "out").samples == 40
    (tmp_path / "out" / "val" / "shard-000000.tar").unlink()
    (fault,) = faults(tmp_path / "out")
    assert "val/shard-000000.tar: missing, with 20 samples" in fault


def test_re_encoded_sets_verify(tmp_path: Path) -> None:
    tree(tmp_path / "tree", 4)
    convert_folder(tmp_path / "tree", tmp_path / "out", ConvertOptions(resize=32, crop_ready=True))
    assert faults(tmp_path / "out") == []


def test_a_missing_and_a_surplus_shard_are_named(out: Path) -> None:
    (out / "shard-000003.tar").rename(out / "shard-000077.tar")
    found = faults(out)
    assert len(found) == 2
    assert any("shard-000003.tar: missing, with 3 samples" in fault for fault in found)
    assert any("shard-000077.tar: surplus" in fault for fault in found)


def test_a_cut_shard_is_named_with_the_samples_it_lost(out: Path) -> None:
    source = open_shards(out)
    assert source.layout is not None
    rows = source.layout.storage_order[source.layout.shard_starts[2] : source.layout.shard_starts[3]]
    second = int(rows[1])
    os.truncate(out / "shard-000002.tar", int(source.index.columns["offset"][second]) + 10)
    found = faults(out)
    assert any("shard-000002.tar: cut: " in fault for fault in found)
    for row in rows[1:].tolist():
        assert any(f"member {int(source.ids[row]):09d}.*: cut off" in fault for fault in found)
    assert not any(f"{int(source.ids[rows[0]]):09d}" in fault for fault in found)


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        (100, b"\x55", "jpg: altered"),
        (-512, b"x", "an altered header"),
        (0, None, "jpg: zeroed"),
    ],
)
def test_an_altered_or_zeroed_member_is_named(out: Path, at: int, data: bytes | None, message: str) -> None:
    source = open_shards(out)
    if data is None:
        data = bytes(int(source.index.columns["size"][17]))
    shard, key = patch(source, 17, at, data)
    found = faults(out)
    assert any(f"{shard}: altered: sha256" in fault for fault in found)
    assert any(shard in fault and key in fault and message in fault for fault in found)
    assert all(shard in fault for fault in found)


def test_an_altered_label_is_named(out: Path) -> None:
    source = open_shards(out)
    size = int(source.index.columns["size"][21])
    shard, key = patch(source, 21, -(-size // 512) * 512 + 512, b"7")
    found = faults(out)
    assert any(f"{shard} member {key}.jpg: another label" in fault for fault in found)


def test_a_surplus_member_is_named(out: Path) -> None:
    import io

    with tarfile.open(out / "shard-000013.tar", "a") as tar:
        info = tarfile.TarInfo("000000999.jpg")
        info.size = 5
        tar.addfile(info, io.BytesIO(b"extra"))
    found = faults(out)
    assert any("shard-000013.tar member 000000999.jpg: surplus" in fault for fault in found)


@pytest.mark.parametrize("harm", ["class file", "index data", "index cut", "class file gone"])
def test_faults_of_what_lies_beside_the_shards_are_named(out: Path, harm: str) -> None:
    path = out / (INDEX_NAME if harm.startswith("index") else "classes.json")
    data = bytearray(path.read_bytes())
    path.unlink()
    if harm == "class file":
        path.write_text('{"ant": 1}')
    elif harm == "index data":
        data[-1000] ^= 1
        path.write_bytes(data)
    elif harm == "index cut":
        path.write_bytes(data[:-1])
    found = faults(out)
    assert found
    assert path.name in found[0]


def test_what_is_no_finished_set_is_an_error(out: Path, tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="the index of a finished set"):
        verify_shards(tmp_path / "tree")
    (out / WORK_NAME).mkdir()
    with pytest.raises(ShardError, match="unfinished conversion"):
        verify_shards(out)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the command line in this process and return its exit code."""
    from fastdata.cli import main

    monkeypatch.setattr("sys.argv", ["fastdata", *map(str, arguments)])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_commands_say_what_they_did_and_exit_with_1_on_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree(tmp_path / "tree", 3)
    out = tmp_path / "out"
    assert run(monkeypatch, "shard", tmp_path / "tree", out, "--split", "train=0.75,val=0.25") == 0
    assert "train: 9 samples in 1 shard," in capsys.readouterr().err
    assert run(monkeypatch, "verify", out) == 0
    assert capsys.readouterr().out.startswith("no fault: 12 samples in 2 shards")
    (out / "val" / "shard-000000.tar").unlink()
    assert run(monkeypatch, "verify", out) == 1
    assert "missing, with 3 samples" in capsys.readouterr().out
    assert run(monkeypatch, "shard", tmp_path / "tree", out) == 1
    assert "it holds shards already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [("shard", "nowhere", "out"), ("verify", "nowhere"), ("check", "nowhere"), ("shard", ".", "out", "--split", "x")],
)
def test_bad_arguments_are_one_message_and_no_trace(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments) in (1, 2)
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert len(errors.strip().splitlines()) == 1
