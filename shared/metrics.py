"""What is measured of every optimizer step: names, units and meanings.

These are the names in commit records, in the scheduler's answers and, after ``digenrl_``, in its
Prometheus metrics. docs/metrics.md is this table for people. A row is one trained denoising step of
one sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    unit: str
    """Or the range; 1 is a plain number."""
    meaning: str


STEP_METRICS: Mapping[str, Metric] = {
    "reward_mean": Metric("reward", "mean over the batch's samples"),
    "reward_std": Metric("reward", "population standard deviation over the batch's samples"),
    "failed_fraction": Metric("0..1", "samples that could not be scored"),
    "dropped_groups": Metric("groups", "of which too many samples could not be scored"),
    "advantage_mean": Metric("1", "mean over samples; 0 but for rounding"),
    "advantage_std": Metric("1", "population standard deviation over samples"),
    "advantage_min": Metric("1", "smallest, before `algorithm.advantage_clip`"),
    "advantage_max": Metric("1", "largest, before `algorithm.advantage_clip`"),
    "zero_advantage_fraction": Metric("0..1", "rows without advantage: they teach nothing"),
    "loss": Metric("1", "sum over rows, over the number of rows of the batch"),
    "kl": Metric("1", "mean divergence from the base model; 0 if `algorithm.kl_beta` is 0"),
    "approx_kl": Metric(
        "nats per element", "mean of ratio - 1 - log ratio: how far the policy is from the one "
        "that generated; 0 on-policy",
    ),
    "ratio_mean": Metric("1", "mean ratio to the policy that generated; 1 on-policy"),
    "ratio_min": Metric("1", "smallest ratio"),
    "ratio_max": Metric("1", "largest ratio"),
    "onpolicy_ratio_error": Metric(
        "1", "largest abs(ratio - 1) of rows of staleness 0; at most 1e-6 in float32"
    ),
    "stale_ratio_error": Metric("1", "largest abs(ratio - 1) of stale rows"),
    "weight_mean": Metric("1", "mean weight of the decoupled loss; otherwise 1"),
    "clip_fraction_low": Metric(
        "0..1", "rows without gradient: ratio below 1 - `clip_range`, advantage negative"
    ),
    "clip_fraction_high": Metric(
        "0..1", "rows without gradient: ratio above 1 + `clip_range`, advantage positive"
    ),
    "staleness_mean": Metric("versions, 0..1", "mean over samples of batch - policy version"),
    "stale_fraction": Metric("0..1", "stale rows, of those that were not skipped"),
    "grad_norm": Metric("1", "L2 norm of the gradient before clipping; 0 if it was not finite"),
    "learning_rate": Metric("1", "of this step"),
    "skipped_not_finite": Metric("steps", "not taken, because the gradient was not finite"),
    "micro_batch": Metric("samples", "in a training pass, at the end of the batch"),
    "tsp_steps": Metric("denoising steps", "in a training pass, at the end of the batch"),
    "train_seconds": Metric("s", "that the trainer's devices trained, as if side by side"),
    "step_seconds": Metric(
        "s", "since the optimizer step before, or the trainer's start; pauses included"
    ),
    "samples_per_second": Metric("1/s", "images or videos of the batch over `step_seconds`"),
}  # fmt: skip

SCORER_METRICS: Mapping[str, Metric] = {
    "reward_mean": Metric("score", "mean of that scorer's own scores, without its weight"),
    "reward_std": Metric("score", "population standard deviation of its scores"),
}
"""Of each scorer; their names are made by `of_scorer`."""


def of_scorer(metric: str, scorer: str) -> str:
    """
    >>> of_scorer("reward_mean", "ocr")
    'reward_mean/ocr'
    """
    return f"{metric}/{scorer}"


def scorer_of(name: str) -> tuple[str, str]:
    """The inverse: (metric, scorer), with an empty scorer where there is none.

    >>> scorer_of("reward_mean/ocr"), scorer_of("loss")
    (('reward_mean', 'ocr'), ('loss', ''))
    """
    metric, _, scorer = name.partition("/")
    return metric, scorer
