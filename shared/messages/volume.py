"""How much of each stream a run's messages may take, from its recipe."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from shared.limits import MAX_MEMBERS, MAX_MESSAGE_BYTES, MAX_SUMS_BYTES
from shared.messages.codec import group_bytes
from shared.messages.contracts import Prompt
from shared.messages.subjects import FLUID, REW, TASK, TRAIN, TRAJ

BATCHES_AT_ONCE = 5
"""Batches with messages in the streams: two that are kept, the current one, the one that was begun
early, and one that is being removed."""
ATTEMPTS = 1.25
"""Messages per piece of work: some is given back, lost, and done again."""
TASK_BYTES, TRAJ_BYTES, REW_BYTES = 900, 1500, 1600
"""Upper bound in bytes of a message without its prompt, including broker overhead."""
PIECE_BYTES, STEP_BYTES = 1100, 1200
"""Upper bound in bytes of the messages about a piece, to and from its member; and of a member's
messages about the exchange and the step."""
IMAGE_BYTES = 100
"""Most bytes by which a prompt names its source image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchVolume:
    """Messages of one batch."""

    groups: int
    group_size: int
    fragments_per_group: int
    scorers: int
    prompt_bytes: int
    """Bytes of a group's prompt, on average over the longest that a batch could have."""
    pieces: int = 0
    """Maximum number of pieces of its training; 0 without fluid devices."""

    def needs(self) -> dict[str, int]:
        """Most bytes by name of the stream."""
        fragments = self.groups * self.fragments_per_group
        group = group_bytes(self.group_size, self.fragments_per_group, self.scorers)
        scores = 9 * self.groups * self.group_size * (1 + self.scorers)
        once = {
            TASK.name: fragments * (TASK_BYTES + self.prompt_bytes),
            TRAJ.name: fragments * (TRAJ_BYTES + self.prompt_bytes),
            REW.name: fragments * (REW_BYTES + 72 * self.scorers) + scores,
            TRAIN.name: self.groups * min(group, MAX_MESSAGE_BYTES),
        }
        if self.pieces:  # how many members will join is not known
            steps = MAX_MEMBERS * STEP_BYTES + MAX_SUMS_BYTES
            once[FLUID.name] = self.pieces * PIECE_BYTES + steps
        return {name: int(BATCHES_AT_ONCE * ATTEMPTS * size) for name, size in once.items()}


def prompt_bytes(prompts: Iterable[Prompt], groups: int) -> int:
    """Mean bytes of the longest prompts, as many as a batch has groups."""
    longest = heapq.nlargest(groups, map(_bytes, prompts))
    return -(-sum(longest) // max(1, len(longest)))


def _bytes(prompt: Prompt) -> int:
    metadata_bytes = sum(
        len(name) + len(str(value).encode()) + 10 for name, value in prompt.metadata.items()
    )
    image = 0 if prompt.image is None else IMAGE_BYTES
    return len(prompt.text.encode()) + metadata_bytes + image + 16
