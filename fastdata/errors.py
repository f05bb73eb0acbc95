"""Every error of the package: typed, with fields, and with a sentence that says what to do."""

from __future__ import annotations


class FastDataError(Exception):
    """Base of all errors that fastdata raises on purpose.

    Attributes:
        subject: What the error is about: a path, ``shard + member``, an argument or a backend.
        found: What was found there.
        expected: What was expected instead, or "".
        remedy: What to do about it, or "".
    """

    def __init__(self, subject: str, found: str, expected: str = "", remedy: str = "") -> None:
        super().__init__(subject, found, expected, remedy)
        self.subject = subject
        self.found = found
        self.expected = expected
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.subject}: {self.found}"
        if self.expected:
            text += f"; expected {self.expected}"
        return f"{text}. {self.remedy}" if self.remedy else text


class UsageError(FastDataError, ValueError):
    """An argument that is impossible, unknown, or that this backend cannot honour. `subject` names it."""


class SourceError(FastDataError):
    """A folder, label file or stream that cannot serve as a source. `subject` is its path or URL."""


class ShardError(SourceError):
    """A shard or an index that is missing, cut, altered or not in the expected form.

    Attributes:
        member: The member's name inside the shard, or "" where the whole shard is meant.
    """

    def __init__(self, shard: str, found: str, expected: str = "", remedy: str = "", *, member: str = "") -> None:
        super().__init__(f"{shard} member {member}" if member else shard, found, expected, remedy)
        self.shard = shard
        self.member = member

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_shard_error, (self.shard, self.found, self.expected, self.remedy, self.member)


def _rebuild_shard_error(shard: str, found: str, expected: str, remedy: str, member: str) -> ShardError:
    return ShardError(shard, found, expected, remedy, member=member)


class DecodeError(FastDataError):
    """Bytes that the reference decoder refuses. `subject` is empty until the reader of the bytes fills it in."""


class SampleError(FastDataError):
    """A sample that cannot be delivered, raised where ``on_error="raise"``.

    Attributes:
        sample_id: The sample's id.
    """

    def __init__(self, subject: str, found: str, expected: str = "", remedy: str = "", *, sample_id: int = -1) -> None:
        super().__init__(subject, found, expected, remedy)
        self.sample_id = sample_id

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_sample_error, (self.subject, self.found, self.expected, self.remedy, self.sample_id)


def _rebuild_sample_error(subject: str, found: str, expected: str, remedy: str, sample_id: int) -> SampleError:
    return SampleError(subject, found, expected, remedy, sample_id=sample_id)


class SkipBudgetError(FastDataError):
    """More samples were skipped than ``fastdata.Skip(max_fraction=...)`` allows."""


class BackendUnavailableError(FastDataError):
    """A backend that cannot run here. `subject` is its name, `found` the reason, `remedy` how to get it."""


class StateError(FastDataError, ValueError):
    """A ``state_dict`` that does not fit this pipeline."""


class WorkerError(FastDataError, RuntimeError):
    """A worker that died or a stage that failed in a way that is not the fault of one sample."""
