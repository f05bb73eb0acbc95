"""Streams from elsewhere: http, commands, file systems of fsspec. The server runs in a thread of the test."""

from __future__ import annotations

import http.server
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastdata
from fastdata.errors import ShardError, SourceError, UsageError
from tests.shard_files import write_numbered_shards


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """30 numbered samples in three shards."""
    return write_numbered_shards(tmp_path / "shards", [10, 10, 10])


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; a path that begins with /stall never answers whole, /cut breaks off."""

    def do_GET(self) -> None:
        how, _, name = self.path.lstrip("/").partition("/")
        if how not in ("stall", "cut"):
            super().do_GET()
            return
        data = (Path(self.directory) / name).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:7000])
        self.wfile.flush()
        if how == "stall":
            self.server.released.wait(60)  # type: ignore[attr-defined]

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(shards: Path) -> Iterator[str]:
    """Serve the shards; the address."""

    def handler(*args: Any) -> Handler:
        return Handler(*args, directory=str(shards))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        found.daemon_threads = True
        found.released = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.released.set()  # type: ignore[attr-defined]
        found.shutdown()
        thread.join()


def open_remote(data: Any, **overrides: Any) -> fastdata.Pipeline:
    arguments: dict[str, Any] = {
        "backend": "webdataset",
        "transform": fastdata.Resize((32, 32)),
        "batch_size": 4,
        "dtype": "uint8",
        "workers": 2,
        "shuffle": fastdata.BufferShuffle(8),
    }
    return fastdata.open_pipeline(data, **(arguments | overrides))


def ids_of(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch.ids.tolist()]


def allow_pipe() -> fastdata.WebDatasetOptions:
    return fastdata.WebDatasetOptions(allow_pipe=True)


def test_http_shards_give_what_local_ones_give(server: str, shards: Path) -> None:
    with open_remote(server + "/shard-{000000..000002}.tar") as loader:
        remote = ids_of(loader)
    with open_remote(shards, options=fastdata.WebDatasetOptions(stream=True)) as loader:
        assert ids_of(loader) == remote
    assert sorted(remote) == list(range(30))


def test_urls_and_paths_may_be_mixed(server: str, shards: Path) -> None:
    with open_remote([f"{server}/shard-000000.tar", str(shards / "shard-000001.tar")]) as loader:
        assert sorted(ids_of(loader)) == list(range(20))


def test_a_missing_remote_shard_is_named_or_skipped_and_reported(server: str) -> None:
    url = server + "/shard-{000000..000003}.tar"
    with open_remote(url) as loader, pytest.raises(ShardError, match=r"shard-000003\.tar.*exit code 22.*not there"):
        list(loader)
    with open_remote(url, on_error="skip") as loader:
        assert sorted(ids_of(loader)) == list(range(30))
        assert [item.where for item in loader.report().skipped] == [f"{server}/shard-000003.tar"]


def test_a_transfer_that_breaks_off_is_named_and_keeps_what_came(server: str) -> None:
    with open_remote(f"{server}/cut/shard-000000.tar") as loader, pytest.raises(ShardError, match="broke off"):
        list(loader)
    runs = []
    for _ in range(3):
        with open_remote(f"{server}/cut/shard-000000.tar", on_error="skip", shuffle=False) as loader:
            runs.append(ids_of(loader))
    assert runs[0] == runs[1] == runs[2] == [0, 1]


def test_a_server_that_is_not_there_is_an_error() -> None:
    with open_remote("http://127.0.0.1:9/shard.tar") as loader, pytest.raises(ShardError, match="no connection"):
        list(loader)


def test_closing_does_not_wait_for_a_server_that_stalls(server: str, shards: Path) -> None:
    data = [f"{server}/stall/shard-000000.tar", str(shards / "shard-000001.tar")]
    loader = open_remote(data, batch_size=1, prefetch=1, shuffle=False)
    assert next(iter(loader)).ids.tolist()
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 3


def test_commands_run_only_when_allowed(shards: Path) -> None:
    url = f"pipe:cat '{shards}'/shard-{{000000..000002}}.tar"
    with pytest.raises(UsageError, match="allow_pipe"):
        open_remote(url)
    with open_remote(url, options=allow_pipe()) as loader:
        assert sorted(ids_of(loader)) == list(range(30))


@pytest.mark.parametrize("command", ["false", "exit 3", "head -c 4000 {shard}; exit 3", "cat {shard}; exit 3"])
def test_a_command_that_fails_is_an_error_with_its_exit_code(shards: Path, command: str) -> None:
    url = "pipe:" + command.replace("{shard}", str(shards / "shard-000000.tar"))
    code = 1 if command == "false" else 3
    with (
        open_remote(url, options=allow_pipe()) as loader,
        pytest.raises(ShardError, match=f"exit code {code}") as caught,
    ):
        list(loader)
    assert caught.value.shard == url


def test_what_a_failing_command_wrote_is_kept_the_same_in_each_run(shards: Path) -> None:
    url = f"pipe:head -c 7000 {shards / 'shard-000000.tar'}; exit 3"
    for _ in range(5):
        with open_remote(url, options=allow_pipe(), on_error="skip", shuffle=False) as loader:
            assert ids_of(loader) == [0, 1]
            assert "exit code 3" in loader.report().skipped[0].reason


def test_odd_paths_and_backslashes_reach_the_command_as_they_are(tmp_path: Path) -> None:
    folder = write_numbered_shards(tmp_path / "my data; touch PWNED & 'q' \\n", [5])
    with open_remote(folder, options=fastdata.WebDatasetOptions(stream=True)) as loader:
        assert sorted(ids_of(loader)) == list(range(5))
    quoted = str(folder / "shard-000000.tar").replace("'", "'\\''")
    with open_remote(f"pipe:cat '{quoted}'", options=allow_pipe()) as loader:
        assert sorted(ids_of(loader)) == list(range(5))
    assert not [path for path in (tmp_path, Path()) if any("PWNED" == p.name for p in path.iterdir())]


def test_breaking_off_ends_the_commands(shards: Path) -> None:
    url = f"pipe:cat {shards / 'shard-000000.tar'}; exec sleep 1000"
    with open_remote(url, options=allow_pipe(), batch_size=1, shuffle=False, prefetch=1) as loader:
        next(iter(loader))
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _command_line(pid) == b"sleep\x001000\x00"]


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_file_systems_of_fsspec_are_read(shards: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for path in shards.iterdir():
        memory.pipe(f"/bucket/{path.name}", path.read_bytes())
    try:
        with open_remote("memory://bucket/shard-{000000..000002}.tar") as loader:
            assert sorted(ids_of(loader)) == list(range(30))
        with open_remote("memory://bucket/no.tar") as loader, pytest.raises(ShardError, match=r"no\.tar"):
            list(loader)
    finally:
        memory.rm("/bucket", recursive=True)


def test_addresses_that_nothing_opens_are_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match="pip install fsspec"):
        open_remote("gopher://host/shard.tar")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(SourceError, match="pip install fsspec"):
        open_remote("s3://bucket/shard.tar")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SourceError, match="Install curl"):
        open_remote("http://host/shard.tar")


def test_other_backends_refuse_urls_with_advice(server: str) -> None:
    with pytest.raises(UsageError, match="webdataset"):
        fastdata.open_pipeline(
            f"{server}/shard-000000.tar", backend="pil", transform=fastdata.Resize((32, 32)), batch_size=4
        )
