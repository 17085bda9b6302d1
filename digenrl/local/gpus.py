"""Assigns the GPUs of this machine to the processes of a local run, as CUDA_VISIBLE_DEVICES.

GPUs go first to the trainer, then to the rollout workers, to reward workers that load a network,
to encoders, and to the evaluator. Trainer and rollout workers need all their GPUs; the others can
do without.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path

from services.reward.kinds import may_load_a_network
from shared.errors import UserError
from shared.recipe.recipe import Recipe

VISIBLE = "CUDA_VISIBLE_DEVICES"
EVALUATOR, REPORT = "evaluator", "report"
DRIVER = Path("/proc/driver/nvidia/gpus")
"""Holds a folder per GPU if the driver is installed, even without its programs."""
ANSWER_S = 30

Environments = Mapping[str, Mapping[str, str]]
"""Name of a process -> its variables, in addition to the inherited ones."""


@dataclass(frozen=True, slots=True)
class Assignment:
    environments: Environments
    warnings: tuple[str, ...] = ()
    evaluates_at_end: bool = False
    """Whether the evaluator has no GPU of its own, and starts when the others have ended."""


def assign_gpus(recipe: Recipe, gpus: Sequence[str]) -> Assignment:
    """Assign GPUs, which are named as in CUDA_VISIBLE_DEVICES.

    Raises:
        UserError: if there are too few of them to train and to generate.
    """
    rollouts = [f"rollout-{number}" for number in range(recipe.rollout.workers)]
    rewards = [f"reward-{number}" for number in range(recipe.reward.workers)]
    encoders = [f"encoder-{number}" for number in range(recipe.encoder.workers)]
    trainers = trainers_of(recipe)
    every = [*trainers, *rollouts, *rewards, *encoders, EVALUATOR, REPORT]
    if recipe.model.device == "cpu":
        return Assignment({name: {VISIBLE: ""} for name in every})
    num_trained = recipe.trainer.devices
    _check_enough(recipe, num_trained, gpus)
    needed = num_trained + len(rollouts)
    given = {REPORT: gpus[:1]} | {
        name: gpus[first : first + num_trained // len(trainers)]
        for first, name in zip(
            range(0, num_trained, num_trained // len(trainers)), trainers, strict=True
        )
    }
    given |= {name: [gpu] for name, gpu in zip(rollouts, gpus[num_trained:], strict=False)}
    left = list(gpus[needed:])
    takers = _takers(recipe, rewards, encoders)
    warnings = []
    for key, (names, what) in takers.items():
        shared, left = left[: len(names)], left[len(names) :]
        for number, name in enumerate(names):
            given[name] = [shared[number % len(shared)]] if shared else []
        if not shared:
            warnings.append(
                f"{key}: no GPU is left for {what} ({needed} of {len(gpus)} train and generate); "
                "they run on the CPU"
            )
    given[EVALUATOR] = left[:1] or gpus[:1]
    return Assignment(
        {name: {VISIBLE: ",".join(given.get(name, []))} for name in every},
        tuple(warnings),
        evaluates_at_end=not left,
    )


def trainers_of(recipe: Recipe) -> list[str]:
    """Return the names of the members on this host: a process, or a shard group, each."""
    trainer = recipe.trainer
    return [f"trainer-{each}" for each in range(trainer.devices // trainer.shard_devices)]


def _takers(
    recipe: Recipe, rewards: list[str], encoders: list[str]
) -> dict[str, tuple[list[str], str]]:
    """Return the workers that take GPUs that are left, in order: by the key of their number, their
    names and what they do."""
    found = {}
    if any(may_load_a_network(scorer.type) for scorer in recipe.reward.scorers):
        found["reward.workers"] = rewards, "the networks of the rewards"
    if encoders and recipe.encoder.device is None:
        found["encoder.workers"] = encoders, "the encoders"
    return found


def _check_enough(recipe: Recipe, num_trained: int, gpus: Sequence[str]) -> None:
    num_generating = recipe.rollout.workers
    if num_trained + num_generating <= len(gpus):
        return
    trains = "train and generate" if recipe.schedule.members_generate else "train"
    generates = f", {num_generating} to generate" * bool(num_generating)
    raise UserError(
        f"trainer.devices, rollout.workers: {num_trained + num_generating} GPUs needed "
        f"({num_trained} to {trains}{generates}), {len(gpus) or 'none'} found; "
        f'lower these keys, name the GPUs in {VISIBLE}, or set model.device = "cpu"'
    )


def visible_gpus() -> tuple[str, ...]:
    """List the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES: those that the variable
    names, otherwise all GPUs of the machine."""
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        return parse_visible(visible)
    program = shutil.which("nvidia-smi")
    if program is None:
        found = sorted(DRIVER.iterdir()) if DRIVER.is_dir() else []
        return tuple(str(number) for number, _ in enumerate(found))
    try:
        answer = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(
            f"{program} -L does not list the GPUs ({error}); name them in {VISIBLE}"
        ) from error
    return parse_nvidia_smi(answer.stdout)


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
        elif (part := re.search(r"UUID: (MIG-[^)]+)\)", line)) and slices:
            slices[list(slices)[-1]].append(part[1])
    return tuple(chain.from_iterable(parts or [gpu] for gpu, parts in slices.items()))
