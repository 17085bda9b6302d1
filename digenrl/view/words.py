"""Names what devices do in the words of the run's page and of the command line."""

USES = {
    "generating": "generates", "training": "trains", "scoring": "scores", "committing": "commits",
    "waiting_for_rollout": "waits for generation", "waiting_for_trainer": "waits for the trainer",
    "waiting_for_reward": "waits for rewards", "waiting_for_weights": "loads weights",
    "waiting_for_conditions": "waits for encoded prompts", "tail": "nothing left in this batch",
    "paused": "paused",
}  # fmt: skip
"""What devices do, in the order of the legend."""


QUEUES = {
    "generation": ("given to no device yet", "devices are missing, or hang: see the workers"),
    "in_hand": ("at devices that generate", "the worker hangs or has become slow: drain it"),
    "scoring": ("waiting for rewards", "reward workers are too few, or hang: more reward.workers"),
    "training": ("waiting to be trained", "the trainer hangs, or has become slow"),
}  # fmt: skip
"""Queues in the order in which samples go through them, and what it means if one is late."""


def clock(seconds: float) -> str:
    """Return how long something takes, in words.

    >>> clock(33507), clock(270), clock(45)
    ('9 h 18 min', '4 min 30 s', '45 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


FIGURES = {
    "reward": "training reward", "proxy_accuracy": "accuracy, training classifier",
    "gold_accuracy": "gold accuracy, held-out network",
    "gold_svm_accuracy": "gold accuracy, held-out SVM",
    "gold_worst_digit": "gold accuracy, worst digit",
    "gold_nn": "distance to real images", "gold_div": "distance within a digit",
}  # fmt: skip
"""Figures of evaluations in words; others have the names of their scorers."""


def words_of(mode: str) -> dict[str, str]:
    """Return what devices do, in words, in a mode of the schedule: fluid devices commit by adding
    up each other's gradients."""
    return USES | {"committing": "exchanges gradients"} if mode == "fluid" else USES


def words_for(use: str | None, activity: str) -> str:
    """Return what a worker does: by the scheduler's account, or else by its own.

    >>> words_for("tail", "idle"), words_for(None, "waiting_for_work")
    ('nothing left in this batch', 'waiting for work')
    """
    return USES.get(use or "", (use or activity).replace("_", " "))
