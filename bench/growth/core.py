"""Helpers of the growth measurements: a plan, versions, and answers of workers."""

from collections.abc import Iterator

from services.scheduler.core.state import Plan
from shared.learning.prompts import PromptOrder
from shared.learning.windows import Windows
from shared.messages.contracts import (
    Command,
    FragmentGenerated,
    FragmentScored,
    GenerateFragment,
    ObjectRef,
    Policy,
    PolicyPublished,
    Prompt,
    Trajectories,
)
from shared.recipe.schedule import RunSchedule

GROUP_SIZE = 16
SCORERS = "proxy"
REF = ObjectRef(key="bench/object", sha256="0" * 64, size=1)


def plan_of(devices: int, fragments_per_device: int, *, batches: int = 10**6) -> Plan:
    """Return a plan with `fragments_per_device` fragments of four samples for each device."""
    return Plan(
        prompts=PromptOrder(tuple(Prompt(text=f"prompt {number}") for number in range(97)), seed=0),
        num_batches=batches,
        num_groups=devices * fragments_per_device * 4 // GROUP_SIZE,
        group_size=GROUP_SIZE,
        windows=Windows(first=0, last=2),
        seed=0,
        schedule=RunSchedule(fragment_size=4),
    )


def policy_of(version: int) -> Policy:
    return Policy(version=version, weights_digest=f"{version:064x}")


def published(version: int) -> PolicyPublished:
    return PolicyPublished(
        policy=policy_of(version), weights=REF, worker="trainer-0", seconds=0.0, checksum=None
    )


def results_of(
    command: Command, seconds: float = 1.0
) -> Iterator[FragmentGenerated | FragmentScored]:
    """What workers answer to a command; ``seconds``: that a fragment takes."""
    if isinstance(command, GenerateFragment):
        stored = Trajectories(
            trajectory=REF, conditions=REF, media=REF,
            weights_digest=command.policy.weights_digest,
        )  # fmt: skip
        rewards = tuple(float(sample) for sample in command.fragment.samples)
        yield FragmentGenerated(
            fragment=command.fragment, policy=command.policy, prompt=command.prompt, stored=stored,
            worker=command.worker, seconds=seconds,
        )  # fmt: skip
        yield FragmentScored(
            fragment=command.fragment, policy=command.policy, stored=stored, rewards=rewards,
            parts={SCORERS: rewards}, generated_by=command.worker, worker="reward-0", seconds=0.1,
        )  # fmt: skip
