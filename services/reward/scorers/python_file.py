"""A reward function of the user's own, in a process of its own.

A call that raises, or returns something that is no number, fails its samples. A sample whose call
hangs or ends the process fails, and the process is restarted for the other samples: at most
`MAX_LOST_CALLS` times for a fragment, after which the remaining samples fail untried.
"""

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import structlog

from services.reward.reward_file import GROUP_PARAMETERS, PARAMETERS, RewardFile
from services.reward.scorer import SOURCES, Media, Metadata
from services.reward.scorers.python_process import Process, RewardProcessDied, python_command
from shared.errors import SamplesFailed, UserError
from shared.limits import MAX_LOST_CALLS

PROMPT = "prompt"

IMPORTS_VARY = 3.0
"""Factor by which an import may take longer than one before."""

log = structlog.get_logger()


class PythonScorer:
    def __init__(self, file: RewardFile, *, patience: float, whole_groups: bool = False) -> None:
        """Start the process and wait up to ``patience`` seconds for the import of the file; a slow
        import continues in the background. ``patience`` is also how long a call may take.

        Raises:
            UserError: one line that begins with `source`, if the file cannot be imported, or the
                packages of its environment cannot be installed.
        """
        self._file, self._patience, self._whole_groups = file, patience, whole_groups
        self._command = python_command(file)
        self._process: Process | None = None
        self._import_s = patience
        """Seconds to wait for an import: more than the timeout if the first import took longer."""
        self._lock = threading.Lock()
        try:
            if not self._started().wait_until_ready(patience):
                log.warning("slow_import", source=str(file.path), seconds=patience)
        except RewardProcessDied as lost:
            raise UserError(
                f"source: {file.path}: {lost}{_import_remedy(file, str(lost))}"
            ) from None

    def score(self, media: Media, metadata: Metadata) -> list[float]:
        """Return one number per sample.

        Raises:
            SamplesFailed: if some have none; it holds the numbers of the others.
            ValueError: if these are no pixels.
        """
        if media.dtype != np.uint8:
            raise ValueError(f"a reward function scores pixels, uint8, and these are {media.dtype}")
        asking = _FragmentScores(media, metadata)
        with self._lock:
            for run in _runs(metadata):
                self._ask(asking, run)
        if len(asking.scores) < len(media):
            raise SamplesFailed(
                [asking.scores.get(sample) for sample in range(len(media))],
                asking.reasons,
                final=range(len(media)) if self._whole_groups else asking.final,
            )
        return [asking.scores[sample] for sample in range(len(media))]

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process = None

    def _started(self) -> Process:
        if self._process is None:
            self._process = Process(self._file, self._command)
        return self._process

    def _ask(self, asking: "_FragmentScores", samples: range) -> None:
        """Ask for samples of one prompt. If a call for many samples is lost, each sample is scored
        alone, since one sample may be the cause."""
        takes_many, left = self._file.parameters.takes_many, [samples]
        while left:
            part = left.pop(0)
            reason, is_lost = self._called(asking, part)
            unknown = [sample for sample in part if not asking.is_known(sample)]
            if not unknown:
                continue
            if not is_lost or self._whole_groups or len(part) == 1:
                asking.fail(unknown, reason)
            elif takes_many:
                left += [range(sample, sample + 1) for sample in unknown]
            else:
                asking.fail(unknown[:1], reason)
                rest = range(unknown[0] + 1, part.stop)
                left += [rest] if rest else []

    def _called(self, asking: "_FragmentScores", part: range) -> tuple[str, bool]:
        """Ask for some samples; return why some were not answered, and whether that has lost the
        process."""
        if asking.num_lost >= MAX_LOST_CALLS:
            return (
                f"it was not tried: {MAX_LOST_CALLS} calls before it hung or ended the process",
                False,
            )
        try:
            process = self._started()
            if not process.wait_until_ready(self._import_s):
                return f"the file was not imported within {self._import_s:g} s (patience)", False
            self._import_s = max(self._import_s, IMPORTS_VARY * (process.import_s or 0.0))
            for message in process.ask(*asking.request(self._file, part), self._patience):
                asking.take(part.start + message["sample"], message)
        except RewardProcessDied as lost:
            self._process = None
            asking.num_lost += 1
            log.error("reward_process_lost", source=str(self._file.path), reason=str(lost))
            return str(lost), True
        return "it was not answered", False


class _FragmentScores:
    """Holds what is known of the samples of one fragment."""

    def __init__(self, media: Media, metadata: Metadata) -> None:
        self._media, self._metadata = media, metadata
        self.scores: dict[int, float] = {}
        self.reasons: dict[int, str] = {}
        self.final: set[int] = set()
        """Samples that would fail again, after as long."""
        self.num_lost = 0

    def is_known(self, sample: int) -> bool:
        return sample in self.scores or sample in self.reasons

    def take(self, sample: int, message: Mapping[str, Any]) -> None:
        if "score" in message:
            self.scores[sample] = float(message["score"])
        else:
            self.reasons[sample] = str(message["error"])
            if message.get("final"):
                self.final.add(sample)

    def fail(self, samples: Iterable[int], reason: str) -> None:
        """Note why these samples have no score, and never will."""
        for sample in samples:
            self.reasons[sample] = reason
            self.final.add(sample)

    def request(self, file: RewardFile, part: range) -> tuple[dict[str, Any], bytes]:
        """Return the header and the bytes of a request for samples of one prompt."""
        parameters, given = file.parameters, self._metadata[part.start]
        media = np.ascontiguousarray(self._media[part.start : part.stop])
        images: Any = given.get(SOURCES, ())
        sources = [np.ascontiguousarray(each, np.uint8) for each in images]
        header = {
            "shape": media.shape,
            "sources": [each.shape for each in sources],
            "prompt": given.get(PROMPT, ""),
            "metadata": {k: v for k, v in given.items() if k not in (PROMPT, SOURCES)},
            "media": next(
                name for name in parameters.names if name in (*PARAMETERS[:2], *GROUP_PARAMETERS)
            ),
            "needed": parameters.needed,
            "optional": parameters.optional,
        }
        return header, b"".join(each.tobytes() for each in (media, *sources))


def _import_remedy(file: RewardFile, reason: str) -> str:
    """Return a remedy if the file imports a module from its own folder."""
    missing, folder = re.search("No module named '([^'.]+)", reason), file.path.parent
    if missing and any((folder / name).exists() for name in (f"{missing[1]}.py", missing[1])):
        return "; files beside it are not imported: put what it needs into it, or into a package"
    return ""


def _runs(metadata: Metadata) -> Iterator[range]:
    """Yield the consecutive samples that share a prompt."""
    first = 0
    for number in range(1, len(metadata) + 1):
        if number == len(metadata) or not _share_prompt(metadata[first], metadata[number]):
            yield range(first, number)
            first = number


def _share_prompt(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    if one is other:
        return True
    if SOURCES in one or SOURCES in other:  # arrays, which are not compared
        return False
    return one == other
