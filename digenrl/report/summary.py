"""``summary.json``: the figures of a run. docs/summary.md describes each of them."""

from pydantic import BaseModel

from digenrl.evaluation.quality import Quality


class TagDecision(BaseModel):
    """What TAG decided for a batch, and what came of it."""

    batch: int
    groups: int
    """That the trainer was to generate at most."""
    samples_helped: int
    """That it generated."""
    reason: str
    predicted_gain: float | None
    measured_gain: float | None
    """Against what the batch was predicted to take without help."""


class ScheduleSummary(BaseModel):
    """How the devices were used, over the batches that one scheduler saw from open to commit."""

    num_batches: int
    seconds_per_step: float | None
    """Median."""
    utilisation: float | None
    """Share of their time that rollout and trainer devices generated, trained or committed."""
    utilisation_by_device: dict[str, float]
    """Of every worker, the reward workers too."""
    bubbles: dict[str, float]
    """Share of the time of rollout and trainer devices by what they waited for."""
    staleness: dict[int, int]
    """Trained samples by staleness."""
    samples_helped: int
    """Samples that the trainer's device generated."""
    tag: list[TagDecision]


class EvaluatedVersion(BaseModel):
    """One policy version, as an evaluation found it."""

    version: int
    quality: Quality
    alarms: list[str]
    """Compared with the versions before it."""


class Summary(BaseModel):
    run: str
    seed: int
    steps: int
    """Optimizer steps that the run made."""
    commits: int
    """Commit records that trained a batch; the same number unless something is wrong."""
    wall_s: float
    """From the command to the last commit, of the newest start."""
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
    """Of adapter/pytorch_lora_weights.safetensors."""
    weights_digest: str
    """Of the final policy version, as commit records and trajectories carry it."""
    alarms: list[str] = []
    """Gold rewards that fell while the training reward rose, as the last evaluation found them."""
    warnings: list[str] = []
    """Of on-policy ratios that are further from 1 than rounding explains."""
    evaluations: list[EvaluatedVersion] = []
    """Of every version that was evaluated, before and after among them."""
    schedule: ScheduleSummary
    before: Quality
    after: Quality
