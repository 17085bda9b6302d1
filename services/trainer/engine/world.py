"""Which of the trainer's processes this one is, as torchrun says in the environment."""

import os


def num_ranks() -> int:
    """That torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def this_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Among those on this host: which of its GPUs is this process's."""
    return int(os.environ.get("LOCAL_RANK", "0"))
