"""Distinguishes the trainer's processes, by torchrun's environment. Imports no torch."""

import os


def num_ranks() -> int:
    """Return the number of ranks that torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def this_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return this rank's number on its host, which is the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))
