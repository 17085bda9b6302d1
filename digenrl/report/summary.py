"""Defines ``summary.json``, the figures of a run; docs/summary.md describes each field."""

from pydantic import BaseModel

from digenrl.evaluation.quality import Quality


class TagDecision(BaseModel):
    """Records what TAG decided for a batch, and the result."""

    batch: int
    groups: int
    """Largest number of groups that the trainer was to generate."""
    samples_helped: int
    """Number of samples that the trainer generated."""
    reason: str
    predicted_gain: float | None
    measured_gain: float | None
    """Gain over the predicted time of the batch without help."""


class ScheduleSummary(BaseModel):
    """Says how the devices were used in the batches that one scheduler saw from open to commit."""

    num_batches: int
    seconds_per_step: float | None
    """Median step time."""
    utilisation: float | None
    """Share of their time that rollout and trainer devices generate, train or commit."""
    utilisation_by_device: dict[str, float]
    """Utilisation of each worker, including reward workers."""
    bubbles: dict[str, float]
    """Share of the time of rollout and trainer devices by what they wait for."""
    staleness: dict[int, int]
    """Number of trained samples by staleness."""
    samples_helped: int
    """Samples that the trainer's device generated."""
    tag: list[TagDecision]


class EvaluatedVersion(BaseModel):
    """Holds the evaluation of one policy version."""

    version: int
    quality: Quality
    alarms: list[str]
    """Alarms for this version, compared with those before it."""


class Summary(BaseModel):
    run: str
    seed: int
    steps: int
    """Number of optimizer steps."""
    commits: int
    """Number of commit records that trained a batch; equals `steps` unless something is wrong."""
    wall_s: float
    """Seconds from the command to the last commit, counted from the newest start."""
    report_s: float
    samples_trained: int
    onpolicy_ratio_error_max: float
    """Largest |ratio - 1| before the first update, over all batches."""
    reward_per_step: list[float]
    """Mean training reward of each batch."""
    reward_before: float
    reward_after: float
    proxy_accuracy_before: float | None
    proxy_accuracy_after: float | None
    gold_accuracy_before: float | None
    gold_accuracy_after: float | None
    gold_svm_accuracy_before: float | None
    gold_svm_accuracy_after: float | None
    gold_worst_digit_before: float | None
    gold_worst_digit_after: float | None
    gold_nn_before: float | None
    gold_nn_after: float | None
    gold_div_before: float | None
    gold_div_after: float | None
    adapter_sha256: str
    """Digest of adapter/pytorch_lora_weights.safetensors."""
    weights_digest: str
    """Digest of the final policy version, as in commit records and trajectories."""
    alarms: list[str] = []
    """A line for each gold reward that fell while the training reward rose, as of the end."""
    warnings: list[str] = []
    """A line if on-policy ratios are further from 1 than rounding explains."""
    evaluations: list[EvaluatedVersion] = []
    """Evaluations of all evaluated versions, including the first and the last."""
    schedule: ScheduleSummary
    before: Quality
    after: Quality
