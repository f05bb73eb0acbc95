"""What a benchmark reads, as it stands in its file; several sources must hold the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastdata.errors import FastDataError, UsageError
from fastdata.pagecache import data_files, total_bytes
from fastdata.wording import counted


def describe_data(data: Sequence[str]) -> dict[str, Any]:
    """Open each source, look at it and return ``samples``, ``fingerprint``, ``classes`` and ``sources``.

    Args:
        data: Folders or shard sets.

    Raises:
        UsageError: Two of them hold different samples, so that their rows would not be comparable.
        SourceError: One cannot be opened.
    """
    sources, identities = [], []
    for name in data:
        source, identity = _describe(name)
        sources.append(source)
        identities.append(identity)
        if identity != identities[0]:
            raise UsageError(
                f"{data[0]} and {name}",
                f"{identities[0]['samples']} and {counted(identity['samples'], 'sample')}, fingerprints"
                f" {str(identities[0]['fingerprint'])[:12]} and {str(identity['fingerprint'])[:12]}",
                "the same samples in all DATA",
                "Convert the folder with `fastdata shard`, or measure them apart.",
            )
    return {**identities[0], "sources": sources}


def _describe(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    from fastdata.sources.open import open_source

    files = data_files(name)
    facts = {
        "data": name,
        "files": None if files is None else len(files),
        "bytes": None if files is None else total_bytes(files),
    }
    source = open_source(name, labels="folders")
    try:
        identity = {
            "samples": len(source),
            "fingerprint": source.fingerprint,
            "classes": len(source.classes),
        }
        return facts | {"kind": source.kind}, identity
    except (TypeError, AttributeError) as exc:
        raise FastDataError(name, f"a stream without an index ({exc})", "data with an index") from exc
    finally:
        source.close()
