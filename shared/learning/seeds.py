"""Every random choice of a run, as a pure function of its seed and of what is chosen.

No generator is carried along: a killed run has nothing to restore, and a sample is the same
whichever worker makes it.
"""

import hashlib


def derive(seed: int, *path: int | str) -> int:
    """Return a 63-bit seed for one purpose.

    >>> derive(0, "sample", 3, 1, 7) == derive(0, "sample", 3, 1, 7)
    True
    >>> derive(0, "sample", 3, 1, 7) == derive(0, "sample", 3, 17)
    False
    """
    text = "/".join([str(seed), *(str(part) for part in path)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sample_seed(seed: int, batch: int, group: int, sample: int) -> int:
    return derive(seed, "sample", batch, group, sample)


def group_seed(seed: int, batch: int, group: int) -> int:
    """Returns the seed of the noise that all samples of a group begin at, where they share it."""
    return derive(seed, "group", batch, group)


def permutation(seed: int, size: int, *path: int | str) -> list[int]:
    """Return the indices 0..size-1 in a random order that depends on the path."""
    return sorted(range(size), key=lambda index: derive(seed, "order", *path, index))
