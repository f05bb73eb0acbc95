"""Folder to tar shards, and back to certainty: the converter and the verifier.

The format (see ``docs/``): plain USTAR tars ``shard-%06d.tar`` of members ``<id>.jpg`` and ``<id>.cls`` side by side,
and an index beside them. Flow of the converter: plan (order, splits) -> load (read, check, re-encode) -> pack (fill
shards up to the cap) -> publish (the index, last).
"""

from fastdata.shards.convert import ConvertResult, SplitResult, convert_folder
from fastdata.shards.options import ConvertOptions

__all__ = ["ConvertOptions", "ConvertResult", "SplitResult", "convert_folder"]
