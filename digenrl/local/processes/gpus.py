"""The GPUs of this machine, and the slices of those that are cut up."""

import os
import re
import shutil
import subprocess
from itertools import chain, takewhile
from pathlib import Path

from digenrl.local.limits import NVIDIA_SMI_TIMEOUT_S
from digenrl.planning.ledger import Card
from shared.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")
"""Holds a folder per GPU if the driver is installed, even without its programs."""
QUERY = ("--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
MIB_PER_GIB = 1024
GIB_PER_GB = 1e9 / 2**30
SLICE = re.compile(r"MIG (\S+?)\.(\d+)gb")


def visible_cards() -> tuple[Card, ...]:
    """Return the GPUs that this process may use, with kind and memory if the driver reports them.

    Raises:
        UserError: as `visible_gpus`.
    """
    names = visible_gpus()
    program = shutil.which("nvidia-smi")
    cards_by_name = _known(program) if program and names else {}
    return tuple(cards_by_name.get(name, Card(name)) for name in names)


def _known(program: str) -> dict[str, Card]:
    """Return the driver's data of GPUs by number and by id, and of slices by id; empty if it does
    not respond."""
    rows = [[cell.strip() for cell in line.split(",")] for line in _said(program, *QUERY)]
    cards = {
        name: Card(name, row[2], float(row[3]) / MIB_PER_GIB if row[3].isdigit() else None)
        for row in rows
        if len(row) == 4
        for name in row[:2]
    }
    gpu = Card("")
    for line in _said(program, "-L"):
        if number := re.match(r"GPU (\d+):", line):
            gpu = cards.get(number[1], Card(number[1]))
        elif (size := SLICE.search(line)) and (name := _slice_name(line)):
            kind = f"{gpu.kind} {size[1]}.{size[2]}gb".strip()
            cards[name] = Card(name, kind, float(size[2]) * GIB_PER_GB)
    return cards


def _said(program: str, *options: str) -> list[str]:
    try:
        return _output(program, *options).splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def _output(*argv: str) -> str:
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
    ).stdout


def visible_gpus() -> tuple[str, ...]:
    """List the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES: those that the variable
    names, otherwise all GPUs of the machine."""
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        return parse_visible(visible)
    program = shutil.which("nvidia-smi")
    if program is None:
        folders = sorted(DRIVER.iterdir()) if DRIVER.is_dir() else []
        return tuple(str(number) for number, _ in enumerate(folders))
    try:
        return parse_nvidia_smi(_output(program, "-L"))
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(
            f"{program} -L does not list the GPUs ({error}); name them in {VISIBLE}"
        ) from error


def parse_visible(visible: str) -> tuple[str, ...]:
    """Parse the value of CUDA_VISIBLE_DEVICES, which hides everything after -1.

    >>> parse_visible("2, GPU-8f1c")
    ('2', 'GPU-8f1c')
    """
    names = (name.strip() for name in visible.split(","))
    return tuple(takewhile(lambda name: name and name != "-1", names))


def parse_nvidia_smi(lines: str) -> tuple[str, ...]:
    """Parse the output of `nvidia-smi -L`: the number of each GPU, or the ids of its MIG slices."""
    slices: dict[str, list[str]] = {}
    for line in lines.splitlines():
        if gpu := re.match(r"GPU (\d+):", line):
            slices[gpu[1]] = []
        elif (name := _slice_name(line)) and slices:
            slices[list(slices)[-1]].append(name)
    return tuple(chain.from_iterable(parts or [gpu] for gpu, parts in slices.items()))


def _slice_name(line: str) -> str | None:
    match = re.search(r"UUID: (MIG-[^)]+)\)", line)
    return match and match[1]
