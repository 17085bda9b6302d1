"""How often a batch may fail before the run does."""

from dataclasses import dataclass

from shared.errors import BatchFailed, OutOfMemory

ATTEMPTS = 2
"""At a batch that is out of memory and cannot be trained in smaller passes: what another process
on the device has taken may be given back by then."""


@dataclass(slots=True)
class Failures:
    """Of the newest batch that has failed."""

    batch: int = -1
    count: int = 0

    def is_final(self, batch: int, error: BatchFailed | OutOfMemory) -> bool:
        """Whether another attempt would end in the same way; notes this one."""
        if isinstance(error, BatchFailed):
            return True
        if error.smaller:
            return False
        self.count = self.count + 1 if batch == self.batch else 1
        self.batch = batch
        return self.count % ATTEMPTS == 0
