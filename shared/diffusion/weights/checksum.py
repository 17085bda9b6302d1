"""A 128-bit checksum over the bits of tensors, taken where they lie, in whole numbers.

Devices that took the same optimizer step compare 16 bytes instead of gigabytes. Two sums modulo
2^64, which no order of additions changes, so that every device and every kernel finds the same:

    sum_k = sum over rows i of  s_k(i) * sum over words j of  r_k(j) * mix(w_ij)      k = 1, 2
    mix(w) = u xor (u >> 32),  u = w * M

All tensors in sequence, by the width of their words (32 bits, or the bits of a narrower type) and
then by name, are cut into rows of `ROW` words; r_k and s_k are odd pseudo-random numbers
(splitmix64: Steele, Lea and Flood 2014). Odd factors let no change of a single word go unseen, and
`mix`, which is one-to-one, brings the high bits of a word, its sign among them, down to where a
factor spreads them: a multilinear hash sees little of a difference in high bits alone (Lemire and
Kaser 2014). Names, types and shapes come in by their sha256.

It finds faults of devices, not forgeries: what is stored has its own sha256.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shared.diffusion.loading.ranks import flat_range, local_shard

ROW = 1 << 14
MAX_WORDS_AT_ONCE = 1 << 22
"""Words that are mixed at a time: the additional memory is some 100 MB."""
BITS = 64
MASK = (1 << BITS) - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SEEDS = {"words": (1, 2), "rows": (3, 4)}
"""Seeds of r_1, r_2 and of s_1, s_2."""
WORD_TYPES = {8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.int8}
"""Types that bits are read as, by the bytes of an element."""


@dataclass(frozen=True, slots=True)
class Checksum:
    value: int
    """128 bits."""

    @property
    def hex(self) -> str:
        """The 32 hexadecimal digits that messages and records have."""
        return f"{self.value:032x}"

    @property
    def digest(self) -> str:
        """The sha256 that names the content of this checksum, where a digest is required."""
        return hashlib.sha256(b"digenrl checksum 1|" + self.value.to_bytes(16, "big")).hexdigest()

    def beside(self, other: "Checksum", about: str = "") -> "Checksum":
        """Return one checksum of both, and of a text about them."""
        both = hashlib.sha256(f"{self.hex}|{other.hex}|{about}".encode()).digest()
        return Checksum(int.from_bytes(both[:16], "big"))


@torch.no_grad()
def checksum(tensors: Mapping[str, Tensor]) -> Checksum:
    """Return the checksum of tensors of one device, of any shapes and types; for sharded tensors
    the checksum of the whole, computed by all ranks together. Reads them once; 16 bytes come to the
    host."""
    ordered = sorted(tensors.items(), key=lambda item: (-_word(item[1]).itemsize, item[0]))
    layout = "".join(f"{name}|{t.dtype}|{tuple(t.shape)}|" for name, t in ordered)
    if not any(isinstance(each, DTensor) for each in tensors.values()):
        return _named(_summed(_segments([tensor for _, tensor in ordered])), layout)
    total = _summed(_own_runs([tensor for _, tensor in ordered]))
    device = local_shard(ordered[0][1]).device
    sums = torch.zeros(2, dtype=torch.int64, device=device) if total is None else total
    dist.all_reduce(sums)  # whole numbers: in any order
    return _named(sums, layout)


@torch.no_grad()
def flat_checksum(part: Tensor, ranges: Sequence[tuple[int, int]], size: int) -> Checksum:
    """Return the checksum of one flat tensor (size,), as `checksum` does under the name "".

    Args:
        part: the part on this rank; the rest is on other ranks, which all call this together.
        ranges: where it belongs: (first, number) of each run of numbers, in their order.
    """
    if tuple(ranges) == ((0, size),):
        return checksum({"": part})
    runs = zip(part.split([number for _, number in ranges]), ranges, strict=True)
    words = part.element_size() // _word(part).itemsize  # of a number
    total = _summed(_placed((run.view(_word(run)), first * words) for run, (first, _) in runs))
    sums = torch.zeros(2, dtype=torch.int64, device=part.device) if total is None else total
    dist.all_reduce(sums)
    return _named(sums, f"|{part.dtype}|{(size,)}|")


def _named(sums: Tensor | None, layout: str) -> Checksum:
    """Return the checksum of what has these sums, with its names, types and shapes."""
    low, high = (0, 0) if sums is None else (int(each) & MASK for each in sums.cpu())
    about = hashlib.sha256(layout.encode()).digest()
    low = (low + int.from_bytes(about[:8], "big")) & MASK
    high = (high + int.from_bytes(about[8:16], "big")) & MASK
    return Checksum(high << BITS | low)


def _summed(segments: Iterator[tuple[Tensor, int]]) -> Tensor | None:
    """Return the two sums (2,) of words, each with the number of its first row."""
    sums = None
    for words, first in segments:
        part_sums = _sums(words, first, -(-len(words) // ROW))
        sums = part_sums if sums is None else sums + part_sums
    return sums


def _own_runs(tensors: list[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Yield what this rank holds of tensors, as `_segments` would have it in the whole; what lies
    whole on every rank is the first rank's."""
    first_row = 0
    for width in (torch.int32, torch.int16, torch.int8):
        begins, runs = 0, list[tuple[Tensor, int]]()
        for tensor in (each for each in tensors if _word(each) is width):
            words = tensor.element_size() // width.itemsize  # of a number
            first, number = flat_range(tensor)
            if number and (isinstance(tensor, DTensor) or not dist.get_rank()):
                own = local_shard(tensor.detach()).contiguous().reshape(-1).view(width)
                runs.append((own, begins + first * words))
            begins += tensor.numel() * words
        yield from _placed(iter(runs), first_row)
        first_row += -(-begins // ROW)


def _placed(runs: Iterator[tuple[Tensor, int]], first_row: int = 0) -> Iterator[tuple[Tensor, int]]:
    """Yield words that begin anywhere in the whole as segments that begin with a row: zeros before
    them add nothing."""
    for words, begins in runs:
        row, place = divmod(begins, ROW)
        padded = torch.nn.functional.pad(words, (place, 0)) if place else words
        for start in range(0, len(padded), MAX_WORDS_AT_ONCE):
            yield padded[start : start + MAX_WORDS_AT_ONCE], first_row + row + start // ROW


def _word(tensor: Tensor) -> torch.dtype:
    return WORD_TYPES[tensor.element_size()]


def _segments(tensors: list[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Yield the words of all tensors with the number of their first row, at most
    `MAX_WORDS_AT_ONCE` at a time, whole rows but for the last of each width."""
    first = 0
    for width in (torch.int32, torch.int16, torch.int8):
        waiting: list[Tensor] = []
        size = 0
        for tensor in tensors:
            if _word(tensor) is not width:
                continue
            words = tensor.detach().contiguous().reshape(-1).view(width)
            while size + len(words) >= MAX_WORDS_AT_ONCE:
                missing = MAX_WORDS_AT_ONCE - size
                yield torch.cat([*waiting, words[:missing]]), first
                first += MAX_WORDS_AT_ONCE // ROW
                words, waiting, size = words[missing:], [], 0
            waiting.append(words)
            size += len(words)
        if size:
            yield torch.cat(waiting), first
            first += -(-size // ROW)


def _sums(words: Tensor, first: int, rows: int) -> Tensor:
    """Return the two sums (2,) of these words, the rows of which begin at number ``first``."""
    mixed = words.to(torch.int64)
    if len(words) < rows * ROW:
        mixed = torch.nn.functional.pad(mixed, (0, rows * ROW - len(words)))
    mixed.mul_(_signed(MULTIPLIERS[0]))
    mixed.bitwise_xor_(mixed >> 32)
    sums = []
    of_each = zip(
        _kept_factors("words", ROW, words.device),
        _kept_factors("rows", _enough(first + rows), words.device),
        strict=True,
    )
    for of_words, of_rows in of_each:
        each = (mixed.view(rows, ROW) * of_words).sum(1)
        sums.append((each * of_rows[first : first + rows]).sum())
    return torch.stack(sums)


@lru_cache(maxsize=32)
def _kept_factors(seed_name: str, count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return the two factors of the first words of a row, or of the first rows. They are cached:
    launching their computation on a GPU takes longer than summing the words of a segment."""
    factors = tuple(_factors(seed, count, device) for seed in SEEDS[seed_name])
    if device.type == "cuda":  # who uses them next may do so in another stream
        torch.cuda.current_stream(device).synchronize()
    return factors


def _enough(rows: int) -> int:
    """Round up to a number of which there are few.

    >>> _enough(5), _enough(3000)
    (1024, 4096)
    """
    return max(1024, 1 << (rows - 1).bit_length())


def _factors(seed: int, count: int, device: torch.device) -> Tensor:
    """Return odd pseudo-random numbers (count,), the first of a seed."""
    mixed = torch.arange(count, dtype=torch.int64, device=device)
    mixed = mixed * _signed(GOLDEN) + _signed(seed * MULTIPLIERS[1] & MASK)
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(multiplier)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """Shift without the sign."""
    return (numbers >> by) & ((1 << (BITS - by)) - 1)


def _signed(number: int) -> int:
    """Return a number of 64 bits as torch takes it."""
    return number - (1 << BITS) if number >> (BITS - 1) else number
