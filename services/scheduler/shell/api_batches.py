"""HTTP views of batches, of their devices, and of policy versions."""

from typing import Literal

from pydantic import Field

from services.scheduler.shell.api_models import View, example

EXAMPLE_GROUP = {
    "group": 3, "attempt": 0, "policy_version": 12, "stages": ["scored", "generated"],
    "rewards": [0.2, 0.9, None, 0.4],
}  # fmt: skip


class BatchView(View):
    """A batch, in flight or committed."""

    model_config = example(
        batch=12, status="committed", staleness={"0": 64}, reward_mean=0.71,
        metrics={"reward_mean": 0.71, "onpolicy_ratio_error": 0.0}, num_fragments={},
    )  # fmt: skip

    batch: int
    """Number of the batch; batch k turns version k into k + 1."""
    status: Literal["in_flight", "early", "committed"]
    """early: begun with the version before, while the batch before is trained."""
    staleness: dict[int, int]
    """Number of samples by staleness, so far."""
    reward_mean: float | None = None
    """Mean reward, once the batch is committed."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Metrics of its optimizer step, once the batch is committed."""
    num_fragments: dict[str, int] = Field(default_factory=dict)
    """Number of fragments by stage, while the batch is in flight."""


class GroupView(View):
    """The samples of one prompt in a batch."""

    model_config = example(**EXAMPLE_GROUP)

    group: int
    """Number of the group in its batch."""
    attempt: int
    """How often the group was sent to training without a result."""
    policy_version: int | None
    """Version that generated the group."""
    stages: list[str]
    """Stage of each of its fragments."""
    rewards: list[float | None]
    """Rewards of its samples, in order; null for one that could not be scored."""


class BatchDetail(BatchView):
    """A batch with its groups."""

    model_config = example(
        batch=13, status="in_flight", staleness={"0": 4}, reward_mean=None, metrics={},
        num_fragments={"pending": 0, "issued": 0, "generated": 1, "scored": 1},
        groups=[EXAMPLE_GROUP],
    )  # fmt: skip

    groups: list[GroupView]
    """Groups of the batch, in order."""


class VersionView(View):
    """A committed policy version."""

    model_config = example(
        version=12, weights_digest="0" * 63 + "c", weights="digits/weights/5e88.safetensors",
        trained_from_batch=11, reward_mean=0.71, onpolicy_ratio_error=0.0, adopted_by=["rollout-0"],
        evaluated=0.83, is_best=True, is_kept=True,
        evaluated_by="gold accuracy, held-out network",
    )  # fmt: skip

    version: int
    """Number of optimizer steps taken."""
    weights_digest: str
    """SHA-256 of its parameters."""
    weights: str
    """Key of its adapter or weights in the object store."""
    trained_from_batch: int | None
    """Batch of its optimizer step; null for version 0."""
    reward_mean: float | None
    """Mean reward of that batch, which the version before has generated."""
    onpolicy_ratio_error: float | None
    """How far the ratio of on-policy samples was from 1."""
    adopted_by: list[str]
    """Workers that report to have its weights loaded just now."""
    evaluated: float | None = None
    """The figure by which versions are compared: the gold rewards of its evaluation, or without any
    the reward; null if it is not evaluated, or if the scheduler responds, which does not read
    evaluations."""
    is_best: bool = False
    """Whether no evaluated version is better, and no older one is equal."""
    evaluated_by: str | None = None
    """Name of the figure in `evaluated`; null if that is null."""
    is_kept: bool | None = None
    """Whether its weights are still stored; null if the scheduler responds."""
