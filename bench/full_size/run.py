"""Runs the recipe with `digenrl up`, watches it, and says what it took."""

import asyncio
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.full_size.watch import OTHERS, Kill, Watched, kill_worker, watch
from digenrl.local.processes.ports import free_ports
from digenrl.local.running.command_lines import command
from digenrl.local.secrets.tokens import KEYS, Tokens
from shared.errors import DigenRLError

GB = 1e9
NAME = "full-size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that has ended, and what was seen of it."""

    seconds: float
    watched: Watched
    summary: dict[str, Any]
    """The run's summary.json."""


async def run_recipe(
    recipe: Path, runs: Path, *, limit_s: float, kill: Kill | None = None
) -> Finished:
    """Runs a recipe to its end, report included; its output goes to up.log beside ``runs``.

    Raises:
        DigenRLError: if it fails, or takes longer than ``limit_s``.
    """
    log, [port] = runs.parent / "up.log", free_ports(1)
    argv = command(
        "up", str(recipe), "--fresh", "--runs", str(runs), "--run", NAME, "--port", str(port)
    )
    began, ended = time.monotonic(), asyncio.Event()
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=output, stderr=output, env={**os.environ, "COLUMNS": "160"}
        )
    tokens = Tokens(runs / NAME / KEYS)
    seen, url = Watched(), f"http://127.0.0.1:{port}"
    beside = [watch(seen, process.pid, url, tokens, ended)]
    if kill is not None:
        beside.append(kill_worker(seen, process.pid, url, tokens, kill))
    tasks = [asyncio.create_task(each) for each in beside]
    try:
        status = await asyncio.wait_for(process.wait(), limit_s)
    except TimeoutError as error:
        process.terminate()
        await process.wait()
        raise DigenRLError(f"not done within {limit_s:.0f} s; see {log}") from error
    finally:
        ended.set()
        for task in tasks[1:]:
            task.cancel()
    await tasks[0]
    if status:
        raise DigenRLError(f"digenrl up ended with status {status}: {_last_lines(log)}")
    summary = json.loads((runs / NAME / "summary.json").read_text())
    seconds = round(time.monotonic() - began, 1)
    return Finished(seconds=seconds, watched=seen, summary=summary)


def _last_lines(log: Path, count: int = 3) -> str:
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-count:])


def figures(finished: Finished) -> dict[str, Any]:
    """Returns what a run took, for a JSON file."""
    watched, summary = finished.watched, finished.summary
    return {
        "seconds": finished.seconds,
        "peak_bytes": watched.total.num_bytes,
        "peak_at_s": round(watched.total.at_s, 1),
        "roles": {name: asdict(peak) for name, peak in sorted(watched.roles.items())},
        "moments": [asdict(moment) for moment in watched.moments],
        **{
            name: summary[name]
            for name in ("commits", "samples_trained", "reward_per_step",
                         "onpolicy_ratio_error_max", "adapter_sha256", "reward_before",
                         "reward_after")
        },
    }  # fmt: skip


def markdown(found: dict[str, Any], *, title: str, how: str) -> str:
    """Returns the report of a run: what it took, by process, and what happened when."""
    rewards = ", ".join(f"{each:.3f}" for each in found["reward_per_step"])
    lines = [
        f"# {title}", "", how, "",
        f"Machine: {machine()}.", "",
        "| | |", "|---|---|",
        f"| optimizer steps committed | {found['commits']} |",
        f"| samples generated and trained | {found['samples_trained']} |",
        f"| mean reward per step | {rewards} |",
        f"| largest on-policy error of a ratio | {found['onpolicy_ratio_error_max']:.2g} |",
        f"| whole run, report included | {found['seconds'] / 60:.1f} minutes |",
        f"| most memory of all processes together | {found['peak_bytes'] / GB:.2f} GB, after "
        f"{found['peak_at_s']:.0f} s |", "",
        "Memory is the sum of proportional set sizes: what processes share, such as a mapped file, "
        "counts once.", "",
        "| process | most memory, GB | after, s |", "|---|---|---|",
    ]  # fmt: skip
    for name, peak in sorted(found["roles"].items(), key=lambda pair: -pair[1]["num_bytes"]):
        shown = f"{name} (NATS, Valkey, object store)" if name == OTHERS else name
        lines.append(f"| {shown} | {peak['num_bytes'] / GB:.2f} | {peak['at_s']:.0f} |")
    lines += ["", "Events, in seconds from the start:", "", "```"]
    lines += [f"{moment['at_s']:8.1f}  {moment['what']}" for moment in found["moments"]]
    return "\n".join([*lines, "```", ""])


def machine() -> str:
    """Describes this machine without its name."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    named = f"{os.cpu_count()} CPU cores ({platform.machine()}), {memory:.0f} GiB of memory"
    if torch.cuda.is_available():
        named += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    versions = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    return f"{named}; {versions}"
