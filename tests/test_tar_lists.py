"""Which shards a path, pattern, range or list means (B75, B76, B80)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fastdata.errors import ShardError, SourceError, UsageError
from fastdata.sources.open import is_shards, is_stream, open_source
from fastdata.sources.shardlist import list_shards
from fastdata.sources.tar import open_shards
from tests.shard_files import picture, write_numbered_shards


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Return four shards of three samples, of another writer."""
    return write_numbered_shards(tmp_path / "shards", [3, 3, 3, 3])


def test_all_forms_give_the_same_samples(shards: Path) -> None:
    """B76."""
    forms = [
        shards,
        str(shards),
        f"{shards}/*.tar",
        f"{shards}/shard-*.tar",
        f"{shards}/shard-00000?.tar",
        f"{shards}/shard-{{000000..000003}}.tar",
        f"{shards}/shard-{{000000..000001}}.tar,".rstrip(",").replace("000001", "000003"),
        f"{shards}/shard-00000{{0,1,2,3}}.tar",
        [str(path) for path in sorted(shards.iterdir(), reverse=True)],
        [f"{shards}/shard-{{000002..000003}}.tar", shards / "shard-000000.tar", f"{shards}/*1.tar"],
    ]
    for form in forms:
        source = open_source(form)
        assert source.ids.tolist() == list(range(12)), form
        assert [bytes(source.read(i)) for i in range(12)] == [picture(i) for i in range(12)]


def test_one_path_is_one_shard(shards: Path) -> None:
    assert len(open_source(shards / "shard-000002.tar")) == 3


@pytest.mark.parametrize("pattern", ["nothing-*.tar", "nothing-{000..003}.tar", "nothing.tar"])
def test_a_pattern_that_matches_nothing_is_shown(shards: Path, pattern: str) -> None:
    """B76."""
    with pytest.raises(SourceError) as caught:
        open_shards(f"{shards}/{pattern}")
    assert pattern in str(caught.value)


def test_an_empty_folder_and_an_empty_list_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no \.tar file"):
        open_shards(tmp_path)
    with pytest.raises(SourceError, match="no shards"):
        open_shards([])


def test_gaps_in_a_range_are_named(tmp_path: Path) -> None:
    """B75."""
    shards = write_numbered_shards(tmp_path / "ten", [2] * 10)
    (shards / "shard-000004.tar").unlink()
    with pytest.raises(ShardError, match=r"1 of 10 shards missing: .*/shard-000004\.tar"):
        open_shards(f"{shards}/shard-{{000000..000009}}.tar")
    with pytest.raises(ShardError, match=r"4 of 13 .*000004\.tar, .*000010\.tar, .*000011\.tar, .*000012\.tar"):
        open_shards(f"{shards}/shard-{{000000..000012}}.tar")
    with pytest.warns(UserWarning, match="4 shards missing"):
        source = open_shards(f"{shards}/shard-{{000000..000012}}.tar", allow_missing=True)
    assert len(source) == 18


def test_one_shard_named_twice_is_refused(shards: Path) -> None:
    with pytest.raises(SourceError, match="named twice"):
        open_shards([f"{shards}/*.tar", shards / "shard-000001.tar"])


def test_odd_signs_in_paths_stand_for_themselves(shards: Path, tmp_path: Path) -> None:
    """B80: no shell sees a path, and a path that exists is no pattern."""
    odd = tmp_path / "my data; touch PWNED & 'q' {a,b} [x] \\ \"w\""
    shutil.copytree(shards, odd)
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        for form in (odd, [odd / "shard-000000.tar", *(odd / f"shard-00000{i}.tar" for i in (1, 2, 3))]):
            source = open_source(form)
            assert [bytes(source.read(i)) for i in range(12)] == [picture(i) for i in range(12)]
        assert not list(tmp_path.rglob("PWNED"))
    finally:
        os.chdir(before)


def test_urls_are_streams_and_no_paths(shards: Path) -> None:
    for url in ("http://host/{000..009}.tar", "pipe:cat x.tar", "s3://bucket/x.tar", ["https://host/a.tar"]):
        assert is_stream(url)
    with pytest.raises(UsageError, match="no index"):
        open_source("http://host/a.tar")
    for path in (shards, str(shards), "a:b.tar", [shards]):
        assert not is_stream(path)


def test_a_folder_of_pictures_is_no_shards(tmp_path: Path, shards: Path) -> None:
    (tmp_path / "pictures" / "k").mkdir(parents=True)
    assert not is_shards(tmp_path / "pictures")
    assert is_shards(shards)
    assert is_shards("x-{000..100}.tar")


def test_braces_multiply(shards: Path) -> None:
    found, missing = list_shards(f"{shards}/shard-0000{{00..01}}{{,}}.tar".replace("{,}", ""))
    assert (len(found), missing) == (2, [])
    found, missing = list_shards(f"{shards}/{{shard,other}}-{{000000..000001}}.tar")
    assert [os.path.basename(path) for path in found] == ["shard-000000.tar", "shard-000001.tar"]
    assert [os.path.basename(path) for path in missing] == ["other-000000.tar", "other-000001.tar"]
