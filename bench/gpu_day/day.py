"""Runs the parts one after the other: one that fails, or hangs, takes nothing from the others.

What a part has found is a file, so that a day that was interrupted goes on where it was.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rich.console import Console

from bench.gpu_day.report import device_words, file_name, keep, markdown
from digenrl.profile.models import ModelName
from shared.errors import UserError

LAST_LINES = 5


@dataclass(frozen=True, slots=True)
class Day:
    folder: Path
    """Folder for models, logs and what the parts have found."""
    cpu: bool = False
    tiny: bool = False


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
}  # fmt: skip


def run_day(day: Day, out: Path, console: Console, *, again: bool, only: tuple[str, ...]) -> bool:
    """Runs the parts that have found nothing yet, all of them if ``again``, or only those that are
    named; returns whether every part is done. The report is written after each.

    Raises:
        UserError: if there is no CUDA device and a CPU was not asked for.
    """
    check(day, only)
    (day.folder / "parts").mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(PARTS, 1):
        if only and name not in only:
            continue
        if not again and found_of(day, name).get("status") == "done":
            console.print(f"{number}/{len(PARTS)} {name}: done before", highlight=False)
            continue
        part = PARTS[name]
        console.print(
            f"{number}/{len(PARTS)} {name}: {part.title} (at most {part.minutes:.0f} minutes)",
            highlight=False,
        )
        found = run_part(day, name)
        words = found["status"] if found["status"] == "done" else f"failed: {found['reason']}"
        console.print(f"    {words}, {found['seconds']:.0f} s", highlight=False)
        write_report(day, out)
    for path in write_report(day, out):
        console.print(f"{path}", highlight=False, soft_wrap=True)
    return all(found_of(day, name).get("status") == "done" for name in PARTS)


def check(day: Day, only: tuple[str, ...]) -> None:
    import torch

    unknown = [name for name in only if name not in PARTS]
    if unknown:
        raise UserError(f"--part: {unknown[0]} is none of {', '.join(PARTS)}")
    if day.cpu and not day.tiny:
        raise UserError("--cpu: takes hours at full size; add --tiny")
    if not day.cpu and not torch.cuda.is_available():
        raise UserError("gpu-day: no CUDA device here; --cpu --tiny rehearses it on the CPU")


def run_part(day: Day, name: str) -> dict[str, Any]:
    """Runs a part in a process of its own; returns and stores what it has found, or why not."""
    part, path = PARTS[name], day.folder / "parts" / f"{name}.json"
    log, told = path.with_suffix(".log"), path.with_suffix(".found")
    told.unlink(missing_ok=True)
    hidden = NO_GPU if day.cpu else {}
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv_of(name, day), stdout=output, stderr=output, start_new_session=True,
            env={**os.environ, **hidden, **(part.environment or {})},
        )  # fmt: skip
        reason = _ended(process, 60 * part.minutes)
    found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
    if reason is None and told.is_file():
        found |= {"status": "done", "found": json.loads(told.read_text())}
    else:
        found |= {"status": "failed", "reason": reason or "it has found nothing",
                  "log": _last_lines(log)}  # fmt: skip
    path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def argv_of(name: str, day: Day) -> list[str]:
    """Returns the command line that does a part in this clone."""
    argv = [sys.executable, "-m", "bench", "gpu-day-part", name, "--folder", str(day.folder)]
    return argv + [f"--{word}" for word in ("cpu", "tiny") if getattr(day, word)]


def _ended(process: "subprocess.Popen[bytes]", seconds: float) -> str | None:
    """Waits for the end of a process and all that it has started; returns why it failed, if so."""
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"not done within {seconds / 60:.0f} minutes"
    except BaseException:  # Ctrl-C ends the part as well
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    return f"status {status}" if status else None


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
    parts = {name: found_of(day, name) for name in PARTS}
    device = device_words(day.cpu)
    out.mkdir(parents=True, exist_ok=True)
    written = [out / f"{file_name(device)}.{kind}" for kind in ("json", "md")]
    content = {"device": device, "tiny": day.tiny, "parts": parts}
    written[0].write_text(json.dumps(content, indent=1) + "\n")
    titles = {name: part.title for name, part in PARTS.items()}
    written[1].write_text(markdown(content, titles))
    return written
