"""The ledger of a host: which process uses which GPU, and how much of its memory.

A member, a shard group or a rollout worker has GPUs to itself, as far as policies are concerned.
Reward networks, encoders and the evaluator take a GPU that no policy uses, or share one where both
fit: the GPU then takes turns, and a member leaves the others' memory alone. A process that fits on
no card runs on the CPU, and the evaluator after the run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from digenrl.trace.memory import MEMORY_SHARE

CONTEXT_GIB = 0.5
"""Memory that CUDA takes of a GPU for each process, before any tensor."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, or a slice of one."""

    name: str
    """As in CUDA_VISIBLE_DEVICES."""
    kind: str = ""
    """As its driver has it."""
    gib: float | None = None
    """Its memory; None if it is unknown. Such a card is not shared."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A process, or a shard group, that holds the network: it has cards to itself."""

    process: str
    gib: float | None
    """Minimum memory on each card; None if unknown."""
    wanted_gib: float | None
    """The same with passes of as many rows as pay."""
    cards: int = 1


@dataclass(frozen=True, slots=True)
class CardShare:
    """A process that may share a card."""

    process: str
    gib: float | None
    """Memory on a card; None if unknown. It then takes only a card without a policy."""
    seconds: float = 0.0
    """Seconds of a step that it works, on an H100: cards are given the work in turn."""
    streamed_gib: float | None = None
    """The same with the network's blocks on the host, if it can do without them."""


@dataclass(frozen=True, slots=True)
class ProcessPlacement:
    """Where a process runs: on the CPU, if it has no cards."""

    cards: tuple[Card, ...] = ()
    policies_on_card: tuple[str, ...] = ()
    """Processes with a policy on the same card."""
    streams: bool = False
    gib: float = 0.0
    """Memory on each card; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Holds the places of all processes of a host, by their names."""

    places: Mapping[str, ProcessPlacement] = field(default_factory=dict)

    def left_gib(self, process: str) -> float | None:
        """Return the memory that a process may take of its card, where others use it as well; None
        where it has the card to itself."""
        place = self.places[process]
        names = {card.name for card in place.cards}
        others = [
            each.gib
            for name, each in self.places.items()
            if name != process and names & {card.name for card in each.cards}
        ]
        if not others or place.cards[0].gib is None:
            return None
        return min(card.gib or 0.0 for card in place.cards) - sum(others)


def share_out(
    cards: Sequence[Card], policies: Sequence[Policy], parts: Sequence[CardShare]
) -> Ledger | None:
    """Return where all of a host's processes run; None if the cards are too few for the policies.

    Policies come first, and the first of them get the cards with the most memory. Each part then
    takes the card on which the fewest policies are, of these one that has the least to do for other
    parts, of these the one with the most room.
    """
    if sum(each.cards for each in policies) > len(cards):
        return None
    ordered = sorted(cards, key=lambda card: -(card.gib or 0.0))
    places, first = dict[str, ProcessPlacement](), 0
    for each in policies:
        own_cards = tuple(ordered[first : first + each.cards])
        places[each.process] = ProcessPlacement(own_cards, gib=each.gib or 0.0)
        first += each.cards
    books = [_CardBook.opened(card, policies, places) for card in cards]
    for part in parts:
        places[part.process] = _placed(part, books)
    return Ledger(places)


@dataclass(slots=True)
class _CardBook:
    """Processes on one card so far."""

    card: Card
    policy: str | None
    room: float | None
    """GiB that further parts may take, so that its policy can work; None if unknown."""
    free: float | None
    """The same, so that its policy has all that it wants."""
    seconds: float = 0.0
    parts: int = 0

    @classmethod
    def opened(
        cls, card: Card, policies: Sequence[Policy], places: Mapping[str, ProcessPlacement]
    ) -> "_CardBook":
        owner = next((each for each in policies if card in places[each.process].cards), None)
        usable_gib = None if card.gib is None else card.gib * MEMORY_SHARE
        if owner is None or usable_gib is None:
            return cls(card, None if owner is None else owner.process, usable_gib, usable_gib)
        if owner.gib is None or owner.wanted_gib is None:
            return cls(card, owner.process, None, None)
        return cls(card, owner.process, usable_gib - owner.gib, usable_gib - owner.wanted_gib)

    def enter(self, part: CardShare, gib: float | None) -> None:
        self.seconds, self.parts = self.seconds + part.seconds, self.parts + 1
        if self.room is not None and self.free is not None:
            self.room, self.free = self.room - (gib or 0.0), self.free - (gib or 0.0)


def _placed(part: CardShare, books: Sequence[_CardBook]) -> ProcessPlacement:
    """Return a part's place, and enter it there."""
    forms = [(part.gib, False)]
    if part.streamed_gib is not None:
        forms.append((part.streamed_gib, True))
    for spares, (gib, streams) in product((True, False), forms):
        able = [book for book in books if _has_room(book, gib, spares=spares)]
        if able:
            best = min(able, key=_preference)
            best.enter(part, gib)
            policies = () if best.policy is None else (best.policy,)
            return ProcessPlacement((best.card,), policies, streams, gib or 0.0)
    return ProcessPlacement()


def _has_room(book: _CardBook, gib: float | None, *, spares: bool) -> bool:
    """Return whether a process of this size fits on the card; ``spares``: the policy keeps its
    preferred memory. If a size is unknown, a card without a policy is enough."""
    room = book.free if spares else book.room
    if room is None or gib is None:
        return book.policy is None
    return gib <= room


def _preference(book: _CardBook) -> tuple[bool, float, int, float]:
    return book.policy is not None, book.seconds, book.parts, -(book.room or 0.0)
