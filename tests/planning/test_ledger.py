"""The ledger shares the cards of a host: what fits is placed, and nothing is promised twice."""

from hypothesis import given
from hypothesis import strategies as st

from digenrl.planning.ledger import Card, CardShare, Policy, share_out
from digenrl.trace.memory import MEMORY_SHARE

GIB = st.one_of(st.none(), st.sampled_from([11.6, 23.5, 37.25, 44.5, 79.6]))


@st.composite
def hosts(draw: st.DrawFn) -> tuple[list[Card], list[Policy], list[CardShare]]:
    cards = [Card(f"{n}", "", draw(GIB)) for n in range(draw(st.sampled_from([1, 2, 8])))]
    gib = draw(st.one_of(st.none(), st.floats(4, 70)))
    wanted = None if gib is None else gib + draw(st.floats(0, 30))
    policies = [
        Policy(f"trainer-{n}", gib, wanted) for n in range(draw(st.integers(0, len(cards) + 1)))
    ]
    sizes = st.one_of(st.none(), st.floats(1, 40))
    parts = [
        CardShare(
            f"part-{n}", draw(sizes), draw(st.floats(0, 9)), draw(st.sampled_from([None, 3.0]))
        )
        for n in range(draw(st.integers(0, 5)))
    ]
    return cards, policies, parts


@given(hosts())
def test_no_card_is_promised_more_than_it_has(
    host: tuple[list[Card], list[Policy], list[CardShare]],
) -> None:
    cards, policies, parts = host
    ledger = share_out(cards, policies, parts)
    assert (ledger is None) == (len(policies) > len(cards))
    if ledger is None:
        return
    names = [*(each.process for each in policies), *(each.process for each in parts)]
    assert sorted(ledger.places) == sorted(names)
    for card in cards:
        here = {name: each for name, each in ledger.places.items() if card in each.cards}
        owners = [each for each in policies if each.process in here]
        assert len(owners) <= 1
        shared = [each for name, each in here.items() if name.startswith("part")]
        if card.gib is None or any(each.gib == 0.0 for each in shared):
            assert not (owners and shared), "what is unknown shares with no policy"
        elif shared:
            taken = sum(each.gib for each in shared) + sum(each.gib or 0.0 for each in owners)
            assert taken <= card.gib * MEMORY_SHARE + 1e-9
    for each in parts:
        place = ledger.places[each.process]
        assert not place.streams or place.gib == each.streamed_gib


def test_members_take_the_largest_cards_and_parts_those_that_nobody_has() -> None:
    cards = [Card("0", "L40S", 44.5), Card("1", "H100", 79.6), Card("2", "L40S", 44.5)]
    policy = Policy("trainer-0", 40.0, 50.0)
    ledger = share_out(cards, [policy], [CardShare("reward-0", 5.0), CardShare("reward-1", 5.0)])
    assert ledger is not None
    named = {name: place.cards[0].name for name, place in ledger.places.items()}
    assert named == {"trainer-0": "1", "reward-0": "0", "reward-1": "2"}
    assert ledger.left_gib("trainer-0") is None, "it shares its card with nobody"


def test_what_a_part_takes_is_left_alone_by_the_member_beside_it() -> None:
    [card] = cards = [Card("0", "H100", 79.6)]
    ledger = share_out(cards, [Policy("trainer-0", 40.0, 50.0)], [CardShare("reward-0", 5.0)])
    assert ledger is not None
    assert ledger.places["reward-0"].policies_on_card == ("trainer-0",)
    assert ledger.left_gib("trainer-0") == (card.gib or 0.0) - 5.0


def test_a_part_goes_without_the_rows_that_a_member_wants_before_it_goes_to_the_cpu() -> None:
    cards = [Card("0", "H100", 79.6)]
    large, huge = CardShare("encoder-0", 16.0, streamed_gib=None), CardShare("encoder-0", 40.0)
    member = [Policy("trainer-0", 45.0, 65.0)]
    for part, is_placed in ((large, True), (huge, False)):
        ledger = share_out(cards, member, [part])
        assert ledger is not None
        assert bool(ledger.places["encoder-0"].cards) is is_placed
