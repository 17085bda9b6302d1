"""Messages for tests: a run of two groups of four samples in fragments of two."""

from dataclasses import replace
from typing import Any

from services.scheduler.core.state import Plan
from shared.learning.prompts import PromptOrder
from shared.learning.windows import Windows
from shared.messages.contracts import (
    Fragment,
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
from shared.run.conditions import Encoding

ENCODING = Encoding(
    model="0" * 64, negative=False, text_tokens=8, dtype="float32", matmul_precision="high"
)
PROMPTS = tuple(Prompt(text=f"a handwritten {word}") for word in ("one", "two", "three"))


def plan(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "num_batches": 3, "num_groups": 2, "group_size": 4, "fragment_size": 2, "seed": 0
    }  # fmt: skip
    fields |= changes
    schedule = {key: fields.pop(key) for key in RunSchedule.model_fields if key in fields}
    return Plan(
        prompts=fields.pop("prompts", PromptOrder(PROMPTS, seed=0)),
        windows=Windows(first=0, last=2),
        schedule=RunSchedule(**schedule),
        **fields,
    )


def with_schedule(plan: Plan, **keys: Any) -> Plan:
    """The plan with keys of its schedule set anew."""
    return replace(plan, schedule=plan.schedule.changed(**keys))


def early_fraction(groups: int, of: int) -> float:
    """Returns the fraction with which so many groups of a batch begin early."""
    return min(1.0, (groups + 0.5) / of)


def digest(version: int) -> str:
    return f"{version:064x}"


def policy(version: int, weights: int | None = None) -> Policy:
    """``weights``: stands for what its digest is of; as a rule its number."""
    return Policy(version=version, weights_digest=digest(version if weights is None else weights))


def published(version: int) -> PolicyPublished:
    return PolicyPublished(
        policy=policy(version),
        weights=ref("weights"),
        worker="trainer-0",
        seconds=0.0,
        checksum=None,
    )


def ref(name: str) -> ObjectRef:
    return ObjectRef(key=f"test/{name}", sha256=digest(0), size=1)


def stored(version: int) -> Trajectories:
    return Trajectories(
        trajectory=ref("trajectory"),
        conditions=ref("conditions"),
        media=ref("media"),
        weights_digest=digest(version),
    )


def generated(task: GenerateFragment) -> FragmentGenerated:
    return FragmentGenerated(
        fragment=task.fragment,
        policy=task.policy,
        prompt=task.prompt,
        stored=stored(task.policy.version),
        worker=task.worker,
        seconds=0.1,
    )


def scored(
    task: GenerateFragment, rewards: tuple[float | None, ...] | None = None
) -> FragmentScored:
    default: tuple[float | None, ...] = tuple(float(sample) for sample in task.fragment.samples)
    return FragmentScored(
        fragment=task.fragment,
        policy=task.policy,
        stored=stored(task.policy.version),
        rewards=default if rewards is None else rewards,
        parts={"proxy": default if rewards is None else rewards},
        generated_by=task.worker,
        worker="reward-0",
        seconds=0.1,
    )


def fragment(**changes: int) -> Fragment:
    fields = {"batch": 0, "group": 0, "first_sample": 0, "num_samples": 2, "attempt": 0}
    return Fragment(**{**fields, **changes})


def task(**changes: int) -> GenerateFragment:
    return GenerateFragment(
        fragment=fragment(**changes), policy=policy(0), prompt=PROMPTS[0], window_start=0,
        worker="rollout-0",
    )  # fmt: skip
