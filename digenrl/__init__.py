"""Reinforcement learning for image and video generators: the names for other programs.

    training = digenrl.train(model="models/sd35-medium", prompts=prompts, reward=score)
    adapter = training.wait().adapter
    with digenrl.Client.open("digits") as run:
        print(run.get_run().reward_mean)

They import nothing of `services` and `shared`, and start `python -m digenrl` for everything else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from digenrl.api.client import Client
    from digenrl.training import Training, TrainingFailed, train

    __version__: str

__all__ = ["Client", "Training", "TrainingFailed", "__version__", "train"]
MODULES = {"Client": "digenrl.api.client"} | dict.fromkeys(
    ("Training", "TrainingFailed", "train"), "digenrl.training"
)


def __getattr__(name: str) -> Any:
    """Import a name when it is used first, as every command imports this package."""
    if name in MODULES:
        return getattr(import_module(MODULES[name]), name)
    if name == "__version__":
        return import_module("importlib.metadata").version("digenrl")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
