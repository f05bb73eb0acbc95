"""What a user asks for: `PipelineSpec` fixes which numbers come out, `Execution` only how fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from fastdata.errors import UsageError
from fastdata.transforms import Recipe

PIXEL_LIMIT: Final = 178_956_970
"""Most pixels of a picture, for every backend: what Pillow refuses by default. Its own setting does not count."""

DType = Literal["float32", "float16", "bfloat16", "uint8"]
MemoryFormat = Literal["channels_last", "contiguous"]
Orientation = Literal["apply", "ignore"]

Labels = Literal["folders"] | str | Path | Callable[[str], Any] | None
"""Where labels come from: class folders, a CSV file of path,label[,label...], a callable on the path, or nowhere."""

BatchTransform = Callable[[Any, Any], tuple[Any, Any]]
"""``(images, labels) -> (images, labels)`` on the device batch."""


@dataclass(frozen=True)
class BlockShuffle:
    """Read shards in random order, some at a time, and mix the samples of these fully: few seeks on slow disks."""

    shards: int = 8
    """Shards a block. More mixes better and reads more widely."""

    def __post_init__(self) -> None:
        """Check the block size."""
        if self.shards < 1:
            raise UsageError("BlockShuffle.shards", f"{self.shards}", "at least 1")


@dataclass(frozen=True)
class BufferShuffle:
    """Mix a stream through a buffer: the only shuffle for streams without an index, and the weakest."""

    samples: int = 10_000
    """Samples held. A sample can move forward by about this many places."""

    def __post_init__(self) -> None:
        """Check the buffer size."""
        if self.samples < 1:
            raise UsageError("BufferShuffle.samples", f"{self.samples}", "at least 1")


Shuffle = bool | BlockShuffle | BufferShuffle


@dataclass(frozen=True)
class Skip:
    """Leave out samples that cannot be decoded, and count them."""

    max_fraction: float = 1.0
    """Share of an epoch's samples that may be skipped before the epoch stops with `SkipBudgetError`, 0..1."""

    def __post_init__(self) -> None:
        """Check the share."""
        if not 0.0 <= self.max_fraction <= 1.0:
            raise UsageError("Skip.max_fraction", f"{self.max_fraction}", "a share, 0..1")


@dataclass(frozen=True)
class PipelineSpec:
    """Which numbers come out of a pipeline, on any backend."""

    recipe: Recipe
    """The checked transforms."""
    batch_size: int
    """Samples a batch and rank."""
    device: str = "cpu"
    """"cpu" or "cuda:N"; where delivered tensors live."""
    dtype: DType = "float32"
    """Of delivered images; "uint8" leaves Normalize out."""
    memory_format: MemoryFormat = "channels_last"
    """Of delivered images."""
    batch_transform: BatchTransform | None = None
    """Runs on the device batch, with random state from (seed, epoch, step, rank)."""
    shuffle: Shuffle = True
    """The order of samples."""
    seed: int = 0
    """Of order and draws."""
    drop_last: bool = False
    """Leave out the last step where it is not full on every rank."""
    skip: Skip | None = None
    """None: the first sample that cannot be delivered raises."""
    orientation: Orientation = "apply"
    """Whether pictures are turned as their EXIF data say."""
    rank: int = 0
    """This rank, 0..world_size-1."""
    world_size: int = 1
    """Number of ranks."""

    def __post_init__(self) -> None:
        """Check values that do not depend on the backend."""
        _one_of("dtype", self.dtype, ("float32", "float16", "bfloat16", "uint8"))
        _one_of("memory_format", self.memory_format, ("channels_last", "contiguous"))
        _one_of("orientation", self.orientation, ("apply", "ignore"))
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise UsageError("batch_size", f"{self.batch_size!r}", "an int >= 1")
        for name in ("seed", "rank", "world_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(name, f"{value!r}", "an int")
        if not isinstance(self.drop_last, bool):
            raise UsageError("drop_last", f"{self.drop_last!r}", "True or False")
        if not isinstance(self.shuffle, bool | BlockShuffle | BufferShuffle):
            raise UsageError("shuffle", f"{self.shuffle!r}", "True, False, fastdata.BlockShuffle or BufferShuffle")
        if not 0 <= self.rank < self.world_size:
            raise UsageError("rank", f"rank {self.rank} of world_size {self.world_size}", "0 <= rank < world_size")
        if self.device != "cpu" and not (self.device.startswith("cuda:") and self.device[5:].isdigit()):
            raise UsageError("device", f"{self.device!r}", 'None, "cpu", "cuda" or "cuda:N"')


Decode = Literal["exact", "fast"]


@dataclass(frozen=True)
class HostOptions:
    """Options of the backend "pil"; "torchvision" takes them too, and decodes on the CPU."""

    pool: Literal["auto", "threads", "processes"] = "auto"
    """Threads share one process: no start-up, no copies. Processes run Python callables side by side and give each its
    own random state; "auto" takes them only where the transform holds a callable."""
    decode: Decode = "exact"
    """"fast" CHANGES PIXELS: JPEGs whose window shrinks to half or less are decoded at 1/2, 1/4 or 1/8 of their size,
    the smallest that leaves the window no smaller than the output, and resized from there. "torchvision" has no such
    decoder and refuses it. Of 512 photographs of about 500 x 375 pixels, random resized crops to 224 reduced 3 % (these
    differ by 1.2 grey levels in the mean; no gain in time beyond noise), crops to 112 reduced 60 % (1.3 levels, 16 %
    less CPU time)."""

    def __post_init__(self) -> None:
        """Check the names."""
        _one_of("HostOptions.pool", self.pool, ("auto", "threads", "processes"))
        _one_of("HostOptions.decode", self.decode, ("exact", "fast"))


@dataclass(frozen=True)
class TorchvisionOptions:
    """Options of the backend "torchvision"."""

    pool: Literal["auto", "threads", "processes"] = "auto"
    """As in `HostOptions`, where the host decodes."""
    decode: Literal["host", "cuda"] = "host"
    """Where JPEGs are decoded, cropped and resized: by `workers` threads or processes of the host, or by nvJPEG and a
    Triton kernel on the GPU that `device` names, while `workers` threads read and cut. nvJPEG repeats chroma samples
    where libjpeg interpolates, so pictures with chroma subsampling differ from the other backends': on an H200 by 0.3
    to 2.8 grey levels in the mean of small pictures whose colours change wildly; 4:4:4 ones do not."""

    def __post_init__(self) -> None:
        """Check the names, and that threads serve the GPU."""
        _one_of("TorchvisionOptions.pool", self.pool, ("auto", "threads", "processes"))
        _one_of("TorchvisionOptions.decode", self.decode, ("host", "cuda"))
        if self.decode == "cuda" and self.pool == "processes":
            found, expected = 'pool="processes" with decode="cuda"', '"auto" or "threads"'
            raise UsageError("TorchvisionOptions.pool", found, expected, "The GPU takes its input from this process.")


@dataclass(frozen=True)
class WebDatasetOptions:
    """Options of the backend "webdataset". Those after `decode` are for streams: shards read from start to end."""

    pool: Literal["auto", "threads", "processes"] = "auto"
    """As in `HostOptions`."""
    decode: Decode = "exact"
    """As in `HostOptions`: "fast" CHANGES PIXELS."""
    stream: bool = False
    """Read local shards as a stream too, without an index. URLs always are streams."""
    allow_pipe: bool = False
    """Whether ``pipe:`` commands may run. They can do anything: allow only those that you wrote yourself."""
    length: int | None = None
    """Samples in all shards together. Makes ``len`` known, and is checked: an epoch of another number is an error."""
    split: Literal["shards", "samples"] = "shards"
    """What several ranks share. "shards": each reads shards of its own, and `length` fixes how many steps all make;
    what a rank's shards hold more is left out of the epoch, where they hold less they are read again. "samples": each
    rank reads all shards and decodes its part: every sample comes once, and the bytes are read once for each rank."""

    def __post_init__(self) -> None:
        """Check values."""
        _one_of("WebDatasetOptions.pool", self.pool, ("auto", "threads", "processes"))
        _one_of("WebDatasetOptions.decode", self.decode, ("exact", "fast"))
        _one_of("WebDatasetOptions.split", self.split, ("shards", "samples"))
        if self.length is not None and self.length < 1:
            raise UsageError("WebDatasetOptions.length", f"{self.length}", "a number of samples >= 1, or None")


@dataclass(frozen=True)
class DaliOptions:
    """Options of the "dali" backend.

    The defaults keep the pixels within the package's bound; threads, shares and queue are the best that
    `benchmarks/dali_loader.py` found on an H200 with 16 cores (``benchmarks/results/dali-loader-h200.json``).
    """

    decode_threads: int | None = None
    """DALI's own CPU threads, in place of `workers`. None: `workers` where pictures are decoded on the CPU; at most 4
    beside a GPU, whose JPEG engines do most of the work: more threads take the trainer's cores and bring nothing."""
    read_threads: int = 2
    """Threads that read files or shards and lay batches out in memory."""
    hw_decoder_load: float = 0.8
    """Share of each batch that goes to the GPU's JPEG engines, 0..1; CUDA kernels and threads decode the rest."""
    queue_depth: int = 3
    """Batches that DALI works on at once. Each holds its memory, on the GPU too."""
    chroma: Literal["fast", "exact"] = "exact"
    """How the GPU enlarges subsampled chroma. "exact" interpolates as libjpeg does, which needs the whole picture to be
    decoded; "fast" decodes the window alone and repeats chroma samples. Decoding on the CPU is exact either way."""
    region_decode: bool = True
    """Whether decoders are asked for the window alone. Off: they decode all they get, and the window is cropped after;
    crop-ready files are cut before, so that this costs them little. ``chroma="exact"`` does so in any case."""
    device_memory_padding_bytes: int = 16 * 2**20
    """GPU memory that each decode thread holds from the start, so that a large picture does not reallocate."""
    host_memory_padding_bytes: int = 8 * 2**20
    """Page-locked host memory that each decode thread holds twice from the start."""
    preallocate_size: tuple[int, int] = (0, 0)
    """(height, width) of the largest usual picture: the JPEG engines get memory for it from the start. (0, 0): none."""

    def __post_init__(self) -> None:
        """Check counts and shares."""
        for name in ("decode_threads", "read_threads", "queue_depth"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"DaliOptions.{name}", f"{value}", "at least 1")
        if not 0.0 <= self.hw_decoder_load <= 1.0:
            raise UsageError("DaliOptions.hw_decoder_load", f"{self.hw_decoder_load}", "a share, 0..1")
        _one_of("DaliOptions.chroma", self.chroma, ("fast", "exact"))
        sizes = (self.device_memory_padding_bytes, self.host_memory_padding_bytes, *self.preallocate_size)
        if min(sizes) < 0:
            raise UsageError("DaliOptions", f"{self}", "sizes >= 0")


@dataclass(frozen=True)
class Execution:
    """How a pipeline runs. May change speed and memory, never a number that comes out."""

    workers: int = 1
    """Threads or processes that load samples; 0 loads in the calling thread, which the backend "dali" refuses."""
    prefetch: int = 2
    """Batches made ahead."""
    pin_memory: bool = False
    """Whether host batches lie in page-locked memory."""
    options: Any = None
    """The backend's own options dataclass, or None for its defaults."""

    def __post_init__(self) -> None:
        """Check counts."""
        if self.workers < 0:
            raise UsageError("workers", f"{self.workers}", '"auto" or an int >= 0')
        if self.prefetch < 1:
            raise UsageError("prefetch", f"{self.prefetch}", "an int >= 1 (batches)")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(name, f"{value!r}", "one of " + ", ".join(f'"{a}"' for a in allowed))
