"""Hosts with several GPUs of one kind each, and which processes of a run go where.

Notation: `h100x8*4` is four hosts of 8 H100, `h100x8*2+a100x8*2` two of each; `h100=12` counts
GPUs, in hosts of the size of an option, and one with the rest.
"""

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import Any

from services.scheduler.costs.capacity import pass_rows
from services.scheduler.costs.devices import SIZED_KIND, kind_named, with_sized
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.split import Split
from shared.errors import UserError

MAX_DEVICES = 4096
HOST = re.compile(r"(?P<kind>.+)x(?P<gpus>\d+)(?:\*(?P<hosts>\d+))?")


@dataclass(frozen=True, slots=True)
class HostClass:
    """A number of equal hosts."""

    kind: str
    gpus: int
    """GPUs of each."""
    number: int

    def __str__(self) -> str:
        return f"{self.kind.lower()}x{self.gpus}*{self.number}"


@dataclass(frozen=True, slots=True)
class Hosts:
    classes: tuple[HostClass, ...]
    memory_gib: Mapping[str, float] = field(default_factory=dict)
    """Kind -> memory of each of its hosts, where that is stated."""

    @property
    def devices(self) -> dict[str, int]:
        """Return kind -> GPUs of all hosts."""
        counts = Counter[str]()
        for each in self.classes:
            counts[each.kind] += each.gpus * each.number
        return dict(counts)

    @property
    def gpus(self) -> dict[str, int]:
        """Return kind -> GPUs of its largest host: what one process can use."""
        kinds = dict.fromkeys(each.kind for each in self.classes)
        return {kind: max(c.gpus for c in self.classes if c.kind == kind) for kind in kinds}

    def named(self) -> Iterator[tuple[str, str, int]]:
        """Yield host by host: name, kind and GPUs."""
        numbers = Counter[str]()
        for each in self.classes:
            for _ in range(each.number):
                numbers[each.kind] += 1
                yield f"{each.kind.lower()}-{numbers[each.kind]}", each.kind, each.gpus

    def __str__(self) -> str:
        return "+".join(map(str, self.classes))


def add_kinds(text: str, profile: Profile) -> Profile:
    """Return the profile with the kinds whose memory is given, as in ``mine=32GiB*4``."""
    return profile.model_copy(update={"devices": with_sized(profile.devices, text)})


def parse_hosts(
    option: str, text: str, profile: Profile, *, host_gpus: int, host_memory: str | None = None
) -> Hosts:
    """Parse ``h100x8*2+a100x8*2``, ``h100=16,a100=16`` or both forms mixed; with the profile of
    `add_kinds`, also ``mine=32GiB*4``.

    Args:
        host_gpus: GPUs of a host where only their number is given.
        host_memory: GiB of each host of a kind, as ``4090=128,l40s=512``.

    Raises:
        UserError: names the option, the problem and the remedy.
    """
    hosts_by_class: list[HostClass] = []
    counted: set[str] = set()
    for part in (piece.strip() for piece in re.split(r"[,+]", text)):
        word, classes = _parse_hosts(option, part, host_gpus)
        name = kind_named(profile.devices, word)
        if name is None:
            near = difflib.get_close_matches(word.upper(), profile.devices, n=1, cutoff=0.5)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(
                f"{option}: {profile.name} knows no {word}{meant}; known are "
                f"{', '.join(profile.devices)}, and any other by its memory, e.g. {word}=32GiB*4"
            )
        if "=" in part and name in counted:
            raise UserError(f"{option}: {name} is given twice; add the counts")
        counted.add(name)
        hosts_by_class += [HostClass(name, gpus, number) for gpus, number in classes]
    hosts = Hosts(tuple(hosts_by_class), _host_memory(host_memory, profile) if host_memory else {})
    if sum(hosts.devices.values()) > MAX_DEVICES:
        raise UserError(f"{option}: more than {MAX_DEVICES} devices; plan for a part of them")
    return hosts


def _host_memory(text: str, profile: Profile) -> dict[str, float]:
    sizes: dict[str, float] = {}
    for part in text.split(","):
        kind, _, size = (piece.strip() for piece in part.partition("="))
        name = kind_named(profile.devices, kind)
        if name is None or not re.fullmatch(r"\d+(\.\d+)?", size) or not float(size):
            raise UserError(
                f"--host-memory: {part.strip()!r} is not kind=GiB of a host, e.g. 4090=128; kinds "
                f"are {', '.join(profile.devices)}"
            )
        sizes[name] = float(size)
    return sizes


def _parse_hosts(option: str, part: str, host_gpus: int) -> tuple[str, list[tuple[int, int]]]:
    """Return the kind that is written, and GPUs per host with the number of such hosts."""
    kind, equals, count = (piece.strip() for piece in part.partition("="))
    if sized := SIZED_KIND.fullmatch(part):
        count = sized[3] or "1"
    if equals and kind:
        if not count.isdecimal() or int(count) == 0:
            remedy = "the count is a whole number, 1 or more, or the memory, e.g. 32GiB"
            raise UserError(f"{option}: {part!r}: {remedy}")
        whole, rest = divmod(int(count), host_gpus)
        return kind, [(gpus, n) for gpus, n in ((host_gpus, whole), (rest, 1)) if gpus and n]
    written = HOST.fullmatch(part)
    if written is None:
        raise UserError(
            f"{option}: {part!r} is not kind=count, e.g. h100=16,a100=16, nor hosts, e.g. "
            "h100x8*2+a100x8*2"
        )
    gpus, number = int(written["gpus"]), int(written["hosts"] or 1)
    if not gpus or not number:
        raise UserError(f"{option}: {part!r}: GPUs and hosts are whole numbers, 1 or more")
    return written["kind"].strip(), [(gpus, number)]


@dataclass(frozen=True, slots=True)
class HostPlacement:
    """Processes of a host."""

    name: str
    kind: str
    gpus: int
    trains: int
    """GPUs that train: of one process, or a rank or a fluid device each."""
    generates: int
    """Rollout workers, on the GPUs after those that train."""


def place(hosts: Hosts, split: Split, ranks: int = 1) -> list[HostPlacement]:
    """Put the members of a kind on as few hosts as hold them, in equal parts where that goes, and a
    rollout worker on each other GPU that the split uses. ``ranks``: ranks of a shard group."""
    trains, left = Counter[str](), Counter(split.rollout)
    for kind, number in split.trainer.items():
        own = [(name, gpus) for name, its, gpus in hosts.named() if its == kind]
        # A group that no host holds is on several.
        unit = ranks if sum(gpus // ranks for _, gpus in own) * ranks >= number else 1
        parts = _shares([(name, gpus // unit) for name, gpus in own], number // unit)
        trains.update({name: part * unit for name, part in parts.items()})
    placements = []
    for name, kind, gpus in hosts.named():
        generates = min(gpus - trains[name], left[kind])
        left[kind] -= generates
        placements.append(HostPlacement(name, kind, gpus, trains[name], generates))
    return placements


def streaming_needs(profile: Profile, hosts: Hosts, split: Split) -> dict[str, tuple[str, float]]:
    """Return the hosts whose memory has weights or inputs of blocks: name -> kind, and GiB that
    processes keep pinned."""
    needs = {
        host.name: (host.kind, _pinned_gib(profile, host))
        for host in place(hosts, split, profile.variant.ranks)
    }
    return {name: each for name, each in needs.items() if each[1]}


def _pinned_gib(profile: Profile, host: HostPlacement) -> float:
    variant, streaming = profile.variant, profile.streaming.get(host.kind)
    of_pass = pass_rows(profile, host.kind, "trainer") * variant.offload_gib
    generates = 0.0 if streaming is None else host.generates * streaming.host_gib
    return generates + host.trains * (variant.host_gib + of_pass)


def check_host_memory(profile: Profile, hosts: Hosts, split: Split) -> None:
    """Check that each host whose memory is stated holds what its processes keep pinned in it.

    Raises:
        UserError: names the host, what it has and the remedy.
    """
    for name, (kind, needed) in streaming_needs(profile, hosts, split).items():
        has = hosts.memory_gib.get(kind, math.inf)
        if needed > has:
            raise UserError(
                f"--host-memory: streamed weights and offloaded inputs take {needed:.0f} GiB of "
                f"the memory of {name}, which has {has:g}; use fewer of its devices, or weights in "
                "fewer bits (model.weights, rollout.weights)"
            )


def host_memory_line(profile: Profile, hosts: Hosts, split: Split) -> str | None:
    """Describe the memory that hosts need for weights and inputs of blocks, where it is not stated;
    None if every host's is."""
    needs = streaming_needs(profile, hosts, split)
    most: dict[str, float] = {}
    for kind, needed in needs.values():
        most[kind] = max(most.get(kind, 0.0), needed)
    lines = [
        f"{needed:.0f} GiB of the memory of each host of {kind}"
        for kind, needed in most.items()
        if kind not in hosts.memory_gib
    ]
    if not lines:
        return None
    return (
        f"streamed weights and offloaded inputs take {' and '.join(lines)}, which nothing here has "
        "measured: --host-memory says what hosts have, e.g. 4090=128"
    )


def _shares(hosts: list[tuple[str, int]], number: int) -> dict[str, int]:
    """Divide this many devices over the fewest hosts that hold them, largest first."""
    ordered = sorted(hosts, key=lambda each: -each[1])
    used = 0
    while sum(gpus for _, gpus in ordered[:used]) < number:
        used += 1
    shares: dict[str, int] = {}
    for place_, (name, gpus) in enumerate(ordered[:used]):
        shares[name] = min(gpus, -(-number // (used - place_)))
        number -= shares[name]
    for name, gpus in ordered[:used]:  # smaller hosts may not hold an equal share
        more = min(gpus - shares[name], number)
        shares[name], number = shares[name] + more, number - more
    return shares


def commands(
    placed: list[HostPlacement],
    keys: Mapping[str, Any],
    *,
    recipe: str,
    environment: Mapping[str, Mapping[str, str]] | None = None,
) -> list[tuple[str, str]]:
    """Return host -> the command that starts all of its processes, as one line of a shell.

    The first host has brokers, scheduler and reward as well, and the encoder if there is one.

    Args:
        keys: recipe keys of the plan; the encoders' count.
        environment: kind -> variables that its rollout workers need.
    """
    return [
        (each.name, " & ".join([*parts, "wait"] if len(parts) > 1 else parts))
        for index, each in enumerate(placed)
        if (parts := _host_commands(
            each, recipe if index == 0 else "", bool(keys.get("encoder.workers")),
            (environment or {}).get(each.kind, {}),
        ))
    ]  # fmt: skip


def _host_commands(
    host: HostPlacement, recipe: str, encodes: bool, variables: Mapping[str, str]
) -> list[str]:
    """Return a command for each role that has GPUs of its own; ``recipe``: of the first host."""
    named, trains, generates = "digenrl host --keys KEYS", host.trains, host.generates
    prefix = "".join(f"{name}={value} " for name, value in variables.items())
    extra = f",reward{',encoder' * encodes} --at ADDRESS --recipe {quote(recipe)}" * bool(recipe)
    parts = list[str]()
    if trains:
        gpus = "" if trains == host.gpus else f" --gpus {_numbers(0, trains)}"
        parts.append(f"{named} --roles trainer{extra}{gpus}")
    if generates:
        gpus = "" if generates == host.gpus else f" --gpus {_numbers(trains, generates)}"
        parts.append(f"{prefix}{named} --roles rollout{'' if trains else extra}{gpus}")
    return parts


def _numbers(first: int, count: int) -> str:
    return f"{first}-{first + count - 1}" if count > 1 else f"{first}"


def trains_where(placed: Sequence[HostPlacement]) -> str:
    """Describe where devices train, as hosts x devices of each; empty for a single host.

    >>> placed = (HostPlacement(name, "H100", 8, 7, 1) for name in ("h100-1", "h100-2"))
    >>> trains_where(list(placed))
    '2 x 7'
    """
    numbers = Counter(each.trains for each in placed if each.trains)
    if numbers.total() < 2:
        return ""
    return " + ".join(f"{hosts} x {n}" for n, hosts in numbers.items())
