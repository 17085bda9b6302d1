"""Every error that this project raises on purpose.

DigenRLError
    UserError             the user can fix it: bad recipe, missing folder, occupied port
    ContractError         bytes are not a message, record or tensor file that we know
        SlotPoisoned      a slot of the bus is taken by bytes that are no message
        Untrainable       the network cannot train on the tensors of a group
        FaultyConditions  the stored conditions of a prompt are invalid
    IntegrityError        a stored object does not match its reference
    AdmissionError        a trajectory may not be trained: wrong version, wrong weights
    CommitConflict        another trainer has committed this batch already
    LeaseLost             another scheduler commands now
    BatchFailed           a batch cannot be trained: trying again would end in the same way
    OutOfMemory           work does not fit the memory of a device
    RanksLost             a rank of a shard group failed, and the others wait for it
    ScoringError          a scorer could not score, or returned something that is no score
        ScorerUnavailable a scorer that runs elsewhere does not answer
        SamplesFailed     a scorer could not score some samples, and has scored the others
    Unavailable           a broker or store does not answer (yet)
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar


class DigenRLError(Exception):
    """Base of every error raised on purpose; anything else that escapes a service is a bug."""


class UserError(DigenRLError):
    """The user can fix it: shown as one line per fault, and the command ends with exit code 2."""


class ContractError(DigenRLError):
    """Bytes are not a message, record or tensor file that we know."""


class SlotPoisoned(ContractError):
    """A slot of the bus is taken by bytes that are no message: the work needs another attempt."""


class Untrainable(ContractError):
    """The network cannot train on the tensors of a group; part of it may be in the gradient."""


class FaultyConditions(ContractError):
    """The stored conditions of a prompt are missing, changed, or do not fit the network: the prompt
    has to be encoded again."""


class IntegrityError(DigenRLError):
    """A stored object does not match its reference."""


class AdmissionError(DigenRLError):
    """A trajectory may not be trained: wrong policy version or wrong weights."""


class CommitConflict(DigenRLError):
    """Another trainer has committed this batch already."""


class LeaseLost(DigenRLError):
    """Another scheduler commands now, or may: this one stands by."""


class BatchFailed(DigenRLError):
    """A batch cannot be trained, and trying again would end in the same way: the run fails."""


class OutOfMemory(DigenRLError):
    """Work does not fit the memory of a device; the message has sizes and the remedy."""

    def __init__(
        self, reason: str, *, smaller: bool = False, what: str = "", remedy: str = ""
    ) -> None:
        """``smaller``: the next attempt needs less memory. ``what`` did not fit, and ``remedy``
        names the keys that avoid it."""
        super().__init__(reason)
        self.smaller = smaller
        self.what = what or reason
        self.remedy = remedy


class RanksLost(DigenRLError):
    """One rank of a shard group cannot do its part of what all do at once: the others wait for it,
    so that all have to be started again."""


class ScoringError(DigenRLError):
    """A scorer could not score, or returned something that is no score; it never counts as 0."""


class ScorerUnavailable(ScoringError):
    """A scorer that runs elsewhere does not answer; no sample is to blame."""


class SamplesFailed(ScoringError):
    """A scorer could not score some samples; it has scored the others."""

    def __init__(
        self, scores: Sequence[float | None], reasons: Mapping[int, str], final: Iterable[int] = ()
    ) -> None:
        """``scores`` has None, and ``reasons`` one line, for a sample without a score. Samples of
        ``final`` would fail again."""
        super().__init__(next(iter(reasons.values()), "no score"))
        self.scores = tuple(scores)
        self.reasons = dict(reasons)
        self.final = frozenset(final)


class Unavailable(DigenRLError):
    """A broker or store does not answer (yet)."""

    noticed_at: ClassVar[float] = -math.inf
    """Monotonic seconds at the newest one of this process: who waits meanwhile does not hang."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        Unavailable.noticed_at = time.monotonic()


class Faults(list[str]):
    """Collects errors of independent checks, so that a person reads all of them at once."""

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect the lines of an error that the block raises."""
        try:
            yield
        except (UserError, ValueError) as error:
            self.extend(line for line in str(error).splitlines() if line not in self)

    def raise_any(self, kind: type[Exception] = UserError) -> None:
        """Raise one error with all lines, if there are any."""
        if self:
            raise kind("\n".join(self))


def how_to_install(extra: str) -> str:
    """Return the remedy for a missing extra: of a wheel, or of a clone."""
    if Path(__file__).resolve().parents[1].name == "_packaged":
        return f'needs the extra "{extra}": pip install "digenrl[{extra}]"'
    return (
        f'needs the extra "{extra}"; in the clone, run make install, '
        f'or .venv/bin/uv pip install -c constraints.txt -e ".[{extra}]"'
    )


def not_utf8(path: Path) -> str:
    """Report where a file is not text in UTF-8: the line, and the byte of that line."""
    data = path.read_bytes()
    try:
        data.decode()
    except UnicodeDecodeError as error:
        line, start = data.count(b"\n", 0, error.start) + 1, data.rfind(b"\n", 0, error.start) + 1
        at = error.start
        return f"line {line}, byte {at - start + 1}: 0x{data[at]:02x}"
    return ""
