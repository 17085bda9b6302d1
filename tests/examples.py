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
    TrainGroup,
    Trajectories,
)
from shared.messages.workers import Activity, Service, WorkerStatus
from shared.recipe.schedule import RunSchedule
from shared.run.commits import CommitRecord, TrainedGroup, record_digest
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


def digest(version: int) -> str:
    return f"{version:064x}"


def policy(version: int, weights: int | None = None) -> Policy:
    """``weights``: stands for what its digest is of; as a rule its number."""
    return Policy(version=version, weights_digest=digest(version if weights is None else weights))


def published(version: int, **changes: Any) -> PolicyPublished:
    fields: dict[str, Any] = {
        "policy": policy(version), "weights": ref("weights"), "worker": "trainer-0",
        "seconds": 0.0, "checksum": None,
    }  # fmt: skip
    return PolicyPublished(**fields | changes)


def record(version: int, after: CommitRecord | None = None, **changes: Any) -> CommitRecord:
    """``after``: the record of the version before; None: it names no parent."""
    fields: dict[str, Any] = {
        "run": "test", "policy": policy(version), "weights": ref("weights"),
        "checkpoint": ref("checkpoint"), "worker": "trainer-0",
        "parent": None if after is None else record_digest(after.encode()),
    }  # fmt: skip
    return CommitRecord(**fields | changes)


def trained_group(
    group: int = 0,
    version: int = 0,
    rewards: tuple[float | None, ...] = (0.0, 1.0, 1.0, 0.0),
    **changes: Any,
) -> TrainedGroup:
    """``version``: the one that generated it."""
    fields: dict[str, Any] = {
        "group": group, "attempt": 0, "policy_version": version, "rewards": rewards, "parts": {},
        "fragments": ((0, len(rewards), 0),), "workers": ("rollout-0-a",),
    }  # fmt: skip
    return TrainedGroup(**fields | changes)


def status(service: Service, activity: Activity = "generating", **changes: Any) -> WorkerStatus:
    """A report of the first worker of a service, or of ``worker``."""
    worker = changes.pop("worker", f"{service}-0")
    fields: dict[str, Any] = {
        "service": service, "worker": worker, "address": f"{worker}-a", "activity": activity
    }  # fmt: skip
    return WorkerStatus(**fields | changes)


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


def group(*fragments: FragmentScored, **changes: Any) -> TrainGroup:
    fields: dict[str, Any] = {
        "batch": 0, "group": 0, "attempt": 0, "policy": policy(0), "fragments": fragments,
        "advantages": (),
    }  # fmt: skip
    return TrainGroup(**fields | changes)


def task(**changes: Any) -> GenerateFragment:
    """``changes``: fields of the task, or of its fragment."""
    place = {name: changes.pop(name) for name in Fragment.model_fields if name in changes}
    fields: dict[str, Any] = {
        "fragment": fragment(**place), "policy": policy(0), "prompt": PROMPTS[0], "window_start": 0,
        "worker": "rollout-0",
    }  # fmt: skip
    return GenerateFragment(**fields | changes)
