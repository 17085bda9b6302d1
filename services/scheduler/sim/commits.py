"""The commit records of the simulated run: made by exclusive create, as in the object store.

A version has two sets of weights, as with an old policy: its policy names those that generate, and
everything that is trained, trained elsewhere and trained on is of the other set.
"""

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.messages.contracts import Policy, TrainGroup
from shared.messages.fluid import Share


class Commit(NamedTuple):
    policy: Policy
    parent: str | None
    """Digest of the trained weights that the step was taken from."""
    trained: tuple[TrainGroup, ...]
    worker: str
    checksum: str | None = None
    """Checksum of weights, moments and average, if fluid devices have made it."""
    shares: tuple[Share, ...] = ()
    """What the sums were made of."""


@dataclass(slots=True)
class Commits:
    versions: list[Commit] = field(default_factory=list)

    def create(
        self,
        policy: Policy,
        parent: Policy | None,
        trained: tuple[TrainGroup, ...],
        worker: str,
        *,
        checksum: str | None = None,
        shares: tuple[Share, ...] = (),
    ) -> bool:
        """False if the version exists."""
        if policy.version < len(self.versions):
            return False
        digest = None if parent is None else trained_digest(parent.weights_digest)
        self.versions.append(Commit(policy, digest, trained, worker, checksum, shares))
        return True


def trained_digest(weights: str) -> str:
    """Return the digest of the trained weights of the version whose weights generate."""
    return hashlib.sha256(f"trained {weights}".encode()).hexdigest()
