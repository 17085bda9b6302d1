"""The commit records of the simulated run."""

from typing import NamedTuple

from shared.messages.contracts import Policy, TrainGroup


class Commit(NamedTuple):
    policy: Policy
    trained: tuple[TrainGroup, ...]
