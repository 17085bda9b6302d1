"""Runs the parts one after the other: one that fails, or hangs, takes nothing from the others.

What a part has found is a file, so that a day that was interrupted goes on where it was.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rich.console import Console

from bench.full_size.watch import family
from bench.gpu_day.report import device_words, file_name, keep, markdown
from digenrl.trace.device_profile.models import ModelName
from shared.errors import UserError
from shared.process.linux import adopt_orphans

LAST_LINES = 5
GRACE_S = 5.0
"""Seconds that a part has to end in once it is asked to, of its limit; what is left is killed."""
POLL_S = 0.05
RESERVE_S = 10.0
"""Seconds of a quarter in which no part runs: the last one ends, and the report is written."""


@dataclass(frozen=True, slots=True)
class Day:
    folder: Path
    """Folder for models, logs and what the parts have found."""
    cpu: bool = False
    tiny: bool = False
    quarter: float = 0.0
    """Minutes for the parts of a quarter: one whose limit does not fit is left for the next
    command. 0: all parts, however long they take."""

    @property
    def names(self) -> tuple[str, ...]:
        return QUARTER if self.quarter else tuple(PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    title: str
    work: str
    """Import string of a function of a `Day` that returns what it has found, for a JSON file."""
    words: tuple[str, ...] = ()
    """What the function is given besides."""
    minutes: float
    """Limit, after which the part is ended."""
    environment: Mapping[str, str] | None = None


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
PARTS: Mapping[str, Part] = {
    "families-cpu": Part(
        title="Tiny networks of every family on the CPU, to compare with",
        work="bench.gpu_day.families:measure", minutes=5, environment=NO_GPU,
    ),
    "families": Part(
        title="Tiny networks of every family: sampled, trained, ratios",
        work="bench.gpu_day.families:measure", minutes=5,
    ),
    "memory": Part(
        title="Traced against measured memory, SD3.5-M", work="bench.gpu_day.memory:measure",
        minutes=12,
    ),
    "passes": Part(
        title="Steps and passes of SD3.5-M in other forms, and what the host waits for",
        work="bench.gpu_day.passes:measure", minutes=6,
    ),
    "commits": Part(
        title="A step, its checksum and its commit, SD3.5-M with a large adapter",
        work="bench.gpu_day.commits:measure", minutes=4,
    ),
    "profile": Part(
        title="Profile of the device, SD3.5-M", work="bench.gpu_day.profiled:measure",
        words=(ModelName.sd35_medium,), minutes=6,
    ),
    **{
        f"profile-{model}": Part(
            title=f"Profile of the device, {model}", work="bench.gpu_day.profiled:measure",
            words=(model,), minutes=6,
        )
        for model in ModelName if model != ModelName.sd35_medium
    },
    "services": Part(
        title="SD3.5-M with random weights through all services, fluid devices",
        work="bench.gpu_day.services:measure", words=("fluid",), minutes=14,
    ),
    "services-shared": Part(
        title="The same, two fluid processes on one GPU, one of which is killed",
        work="bench.gpu_day.services:measure", words=("shared",), minutes=14,
    ),
    "services-lent": Part(
        title="The same, one GPU by turns, or half of several lent by a trainer",
        work="bench.gpu_day.services:measure", words=("lent",), minutes=14,
    ),
    "doctor": Part(title="What `digenrl doctor` finds, with the host's seconds per launch",
                   work="bench.gpu_day.quarter:doctor", minutes=1),
    "services-steady": Part(title="SD3.5-M through all services, steps after the first",
                            work="bench.gpu_day.quarter:steady", minutes=190 / 60),
    "loop": Part(title="A plain diffusers loop by turns with ours, SD3.5-M",
                 work="bench.gpu_day.quarter:loop", minutes=110 / 60),
    "compiled": Part(title="Training passes of SD3.5-M: as they are, compiled, on an int8 base",
                     work="bench.gpu_day.passes:compiled", minutes=110 / 60),
    "decoders": Part(title="Decoders' memory, traced and measured",
                     work="bench.gpu_day.decoders:measure", minutes=75 / 60),
    "rewards": Part(title="CLIP-H scores on the GPU", work="bench.gpu_day.rewards:measure",
                    minutes=45 / 60),
    "rewards-cpu": Part(title="CLIP-H scores on the CPU", work="bench.gpu_day.rewards:measure",
                        minutes=50 / 60, environment=NO_GPU),
}  # fmt: skip
QUARTER = (
    "doctor", "services-steady", "loop", "compiled", "decoders", "rewards", "rewards-cpu",
)  # fmt: skip
"""Parts of `--quarter` by their value: limits of the first four are 8 minutes, of the others 3."""


def process_age() -> float:
    """Returns the seconds since this process was started. Imports take many on a busy machine."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd of all fields (proc(5))
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def run_day(day: Day, out: Path, console: Console, *, again: bool, only: tuple[str, ...]) -> bool:
    """Runs the parts that are not done, all of them if ``again``, or only those that are named;
    those that have failed come after those that were not tried. Returns whether all are done. The
    report is written after each.

    Raises:
        UserError: if there is no CUDA device and a CPU was not asked for.
    """
    began = time.monotonic()
    check(day, only)
    (day.folder / "parts").mkdir(parents=True, exist_ok=True)
    status = {
        name: "" if again else found_of(day, name).get("status", "") for name in only or day.names
    }
    for name in sorted(status, key=lambda name: status[name] == "failed"):
        limit, words = 60 * PARTS[name].minutes, ""
        if status[name] == "done":
            words = "done before"
        elif day.quarter and limit > 60 * day.quarter - RESERVE_S - (time.monotonic() - began):
            words = f"left out, its {limit:.0f} s do not fit"
        console.print(f"{name}: {words or PARTS[name].title}", highlight=False)
        if not words:
            try:
                found = run_part(day, name, limit)
            finally:
                write_report(day, out)
            status[name] = found["status"]
            words = f"{status[name]} {found.get('reason', '')}"
            console.print(f"    {words.strip()}, {found['seconds']:.0f} s", highlight=False)
    for path in write_report(day, out):
        console.print(f"{path}", highlight=False, soft_wrap=True)
    return set(status.values()) == {"done"}


def check(day: Day, only: tuple[str, ...]) -> None:
    import torch

    unknown = [name for name in only if name not in PARTS]
    if unknown:
        raise UserError(f"--part: {unknown[0]} is none of {', '.join(PARTS)}")
    if day.cpu and not day.tiny:
        raise UserError("--cpu: takes hours at full size; add --tiny")
    if not day.cpu and not torch.cuda.is_available():
        raise UserError("gpu-day: no CUDA device here; --cpu --tiny rehearses it on the CPU")


def run_part(day: Day, name: str, limit: float) -> dict[str, Any]:
    """Runs a part in a process of its own; returns and stores what it has found, or why not all.
    However it ends, nothing that it has started is left."""
    part, path = PARTS[name], day.folder / "parts" / f"{name}.json"
    log, told = path.with_suffix(".log"), path.with_suffix(".found")
    hidden = NO_GPU if day.cpu else {}
    adopt_orphans(True)
    others = set(family(os.getpid()))
    began, reason = time.monotonic(), "interrupted"
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv_of(name, day), stdout=output, stderr=output, start_new_session=True,
            env={**os.environ, **hidden, **(part.environment or {})},
        )  # fmt: skip
    try:
        reason = _ended(process, limit)
    finally:
        _end_all(process, others)
        adopt_orphans(False)
        found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
        if (
            told.is_file()
        ):  # of a part that failed, what it has found so far, maybe in an earlier try
            found["found"] = json.loads(told.read_text())
        found["status"] = "failed" if reason or "found" not in found else "done"
        if found["status"] == "failed":
            found |= {"reason": reason or "it has found nothing", "log": _last_lines(log)}
        path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def argv_of(name: str, day: Day) -> list[str]:
    """Returns the command line that does a part in this clone."""
    argv = [sys.executable, "-m", "bench", "gpu-day-part", name, "--folder", str(day.folder)]
    return argv + [f"--{word}" for word in ("cpu", "tiny") if getattr(day, word)]


def _ended(process: "subprocess.Popen[bytes]", limit: float) -> str:
    """Waits for the end of a part, at most until its limit; returns why it failed, if so."""
    try:
        status = process.wait(max(0.0, limit - GRACE_S))
    except subprocess.TimeoutExpired:
        return f"not done within {limit:.0f} s"
    return f"status {status}" if status else ""


def _end_all(process: "subprocess.Popen[bytes]", others: set[int]) -> None:
    """Ends a part and every process below this one but ``others``: also those whose parents have
    ended, which this process has adopted. One that not even SIGKILL ends is given up."""
    deadline = time.monotonic() + GRACE_S
    _signal(left := _left(others), signal.SIGTERM)
    while left and (late := time.monotonic() - deadline) < GRACE_S:
        if late > 0:
            _signal(left, signal.SIGKILL)
        time.sleep(POLL_S)
        process.poll()
        for pid in left - {process.pid}:
            with suppress(ChildProcessError):  # the child of another, which waits for it
                os.waitpid(pid, os.WNOHANG)
        left = _left(others)


def _left(others: set[int]) -> set[int]:
    return set(family(os.getpid())) - others


def _signal(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def _last_lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]


def do_part(name: str, day: Day) -> None:
    """Does a part in this process, and stores what it finds."""
    keep(day.folder, name, resolve_name(PARTS[name].work)(day, *PARTS[name].words))


def found_of(day: Day, name: str) -> dict[str, Any]:
    """Returns what is stored of a part; nothing if it was not run."""
    path = day.folder / "parts" / f"{name}.json"
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def write_report(day: Day, out: Path) -> list[Path]:
    """Writes what is found so far, as JSON and as Markdown, named after the device."""
    parts = {name: found_of(day, name) for name in day.names}
    device = device_words(day.cpu)
    out.mkdir(parents=True, exist_ok=True)
    written = [
        out / f"{file_name(device)}{'-quarter' * bool(day.quarter)}.{kind}"
        for kind in ("json", "md")
    ]
    content = {"device": device, "tiny": day.tiny, "parts": parts}
    written[0].write_text(json.dumps(content, indent=1) + "\n")
    written[1].write_text(markdown(content, {name: PARTS[name].title for name in parts}))
    return written
