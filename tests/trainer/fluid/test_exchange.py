"""Both transports form one total of all sums, and neither waits for ever for a lost member."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.trainer.fluid.exchange import (
    WHOLE_BATCH,
    Exchange,
    ExchangeIncomplete,
    MemberRound,
    Sum,
)
from services.trainer.fluid.group_exchange import GroupExchange, Membership
from services.trainer.fluid.store_exchange import StoreExchange, SumObjects
from services.trainer.fluid.sums import SumLayout, Term, in_order, pack_sum, unpack_sum
from shared.diffusion.training.tally import Tally
from shared.diffusion.weights.checksum import checksum
from shared.errors import ContractError
from shared.messages.fluid import ExchangeSums, Piece, Share
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests import examples

LAYOUT = SumLayout(size=50, dtype=torch.float32, device=torch.device("cpu"))
NAMES = ("a", "b", "c")
Make = Callable[[], Exchange]


@pytest.fixture(params=["store", "group"])
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    """Makes exchanges, and closes them at the end."""
    store, made = ObjectStore(FolderBackend(tmp_path)), list[Exchange]()

    def exchange() -> Exchange:
        is_stored = request.param == "store"
        made.append(
            StoreExchange(store, LAYOUT) if is_stored else GroupExchange(store, LAYOUT, "127.0.0.1")
        )
        return made[-1]

    yield exchange
    for each in made:
        await each.close()


def term(seed: int, rows: int = 1) -> Term:
    gradient = torch.randn(50, generator=torch.Generator().manual_seed(seed))
    tally = Tally(num_rows=rows, loss=0.25 * seed, ratio_min=1.0 - seed / 100, ratio_max=1.0)
    return Term(gradient, tally.as_dict())


def of(term: Term) -> torch.Tensor:
    assert term.gradient is not None
    return term.gradient


def share(worker: str, *groups: int) -> Share:
    pieces = [
        Piece(
            group=g, attempt=0, number=0, first_sample=0, num_samples=4, first_step=0, num_steps=1
        )
        for g in groups
    ]  # fmt: skip
    return Share(worker=worker, sum_number=0, pieces=tuple(pieces))


def member_rounds(
    shares: Sequence[Share], *, batch: int = 0, round_number: int = 0, seconds: float = 20.0,
    by_group: bool = False, hosts: tuple[int, ...] = (), sites: tuple[int, ...] = (),
) -> dict[str, MemberRound]:  # fmt: skip
    message = ExchangeSums(
        batch=batch, attempt=0, round=round_number, policy=examples.policy(batch), committer="b",
        shares=tuple(shares), max_seconds=seconds, hosts=hosts, sites=sites, update=0,
    )  # fmt: skip
    return {
        each.worker: MemberRound.from_message(message, "test", each.worker, by_group=by_group)
        for each in shares
    }


def found_in(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))


async def totals(
    exchanges: dict[str, Exchange], met: dict[str, MemberRound], sums: dict[str, Sum]
) -> list[Term]:
    forming = [exchanges[name].total(met[name], sums.get(name, {})) for name in exchanges]
    return list(await asyncio.gather(*forming))


async def test_all_members_have_the_bits_of_one_total(make: Make) -> None:
    exchanges = {name: make() for name in NAMES}
    for batch in range(3):  # a membership that is kept forms the later ones
        met = member_rounds([share("a", 0), share("b", 1, 2), share("c")], batch=batch)
        sums: dict[str, Sum] = {
            "a": {WHOLE_BATCH: term(batch)},
            "b": {WHOLE_BATCH: term(batch + 1, 2)},
        }
        found = await totals(exchanges, met, sums)
        whole = of(term(batch)) + of(term(batch + 1))
        assert len({checksum({"": of(each)}).hex for each in found}) == 1
        assert torch.allclose(of(found[0]), whole, rtol=1e-6)
        assert [each.tally for each in found[1:]] == [found[0].tally] * 2
        assert found[0].tally["num_rows"] == 3
        assert found[0].tally["ratio_min"] == pytest.approx(1 - (batch + 1) / 100)


async def test_groups_are_added_in_their_order_whoever_has_trained_them(make: Make) -> None:
    groups = {number: term(number) for number in range(5)}
    divided: list[dict[str, tuple[int, ...]]] = [
        {"b": (0, 1, 2, 3, 4)},
        {"a": (4, 0), "b": (2, 1, 3)},
        {"a": (3,), "b": (4, 1), "c": (0, 2)},
    ]
    found = []
    for batch, parts in enumerate(divided):
        shares = [share(name, *own) for name, own in parts.items()]
        exchanges = {name: make() for name in parts}
        sums: dict[str, Sum] = {
            name: {number: groups[number] for number in own} for name, own in parts.items()
        }
        found += await totals(exchanges, member_rounds(shares, batch=batch, by_group=True), sums)
    expected = of(groups[0]).clone()
    for number in range(1, 5):
        expected += of(groups[number])
    assert all(torch.equal(of(each), expected) for each in found)
    assert all(each.tally == found[0].tally for each in found)


async def test_groups_without_a_gradient_count_with_their_rows(make: Make) -> None:
    exchanges = {name: make() for name in ("a", "b")}
    met = member_rounds([share("a", 0), share("b", 1)], by_group=True)
    nothing = Term(None, Tally(num_rows=4).as_dict())
    for each in await totals(exchanges, met, {"a": {0: nothing}, "b": {1: term(1)}}):
        assert torch.equal(of(each), of(term(1)))
        assert each.tally["num_rows"] == 5
        assert math.isfinite(each.tally["ratio_min"])


@pytest.mark.parametrize("lost", ["a", "b"])
async def test_a_round_ends_without_a_lost_member_and_the_next_is_formed_by_the_rest(
    make: Make, lost: str
) -> None:
    exchanges = {name: make() for name in NAMES if name != lost}
    shares = [share("a", 0), share("b", 1), share("c", 2)]
    sums: dict[str, Sum] = {name: {WHOLE_BATCH: term(place)} for place, name in enumerate(NAMES)}
    met = member_rounds(shares, seconds=1.5)
    began = time.monotonic()
    ended = await asyncio.gather(
        *(exchanges[name].total(met[name], sums[name]) for name in exchanges),
        return_exceptions=True,
    )
    assert time.monotonic() - began < 15
    assert [type(each) for each in ended] == [ExchangeIncomplete] * 2
    rest = [each for each in shares if each.worker != lost]
    message = met["a"].message.model_copy(
        update={"shares": tuple(rest), "round": 1, "committer": "c", "max_seconds": 20.0}
    )
    again = {n: MemberRound.from_message(message, "test", n, by_group=False) for n in exchanges}
    [total, *_] = await totals(exchanges, again, sums)
    alive = [place for place, name in enumerate(NAMES) if name != lost]
    whole = of(term(alive[0])) + of(term(alive[1]))
    assert torch.allclose(of(total), whole, rtol=1e-6)


@pytest.mark.parametrize(
    "absent",
    [
        (), ("a",), ("b",), ("a", "b"), pytest.param(("c",), marks=pytest.mark.slow),
        pytest.param(("a", "c"), marks=pytest.mark.slow),
    ],
)  # fmt: skip
async def test_whoever_has_not_come_is_named_whomever_one_waits_for(
    make: Make, absent: tuple[str, ...]
) -> None:
    """ "b" commits: it is not missed by those that wait for its total while others are absent."""
    exchanges = {name: make() for name in NAMES if name not in absent}
    shares = [share("a", 0), share("b", 1), share("c", 2)]
    sums: dict[str, Sum] = {name: {WHOLE_BATCH: term(place)} for place, name in enumerate(NAMES)}
    met = member_rounds(shares, seconds=1.5)
    ended = await asyncio.gather(
        *(exchanges[name].total(met[name], sums[name]) for name in exchanges),
        return_exceptions=True,
    )
    if not absent:
        assert not any(isinstance(each, BaseException) for each in ended)
        return
    by_store = isinstance(next(iter(exchanges.values())), StoreExchange)
    others = tuple(name for name in absent if name != "b")
    expected = others if others and (by_store or "b" not in absent) else ("b",)
    for each in ended:
        assert isinstance(each, ExchangeIncomplete)
        assert each.missing == expected


@pytest.mark.slow
@pytest.mark.parametrize("make", ["group"], indirect=True)
async def test_a_process_group_that_names_nobody_is_caught(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = property(lambda _: (), lambda _, names: None)
    monkeypatch.setattr(Membership, "absent", nobody)
    with pytest.raises(AssertionError):
        await test_whoever_has_not_come_is_named_whomever_one_waits_for(make, ("a",))


async def test_a_committer_that_takes_too_long_is_named_by_those_whose_sums_are_there(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slowly(*_: object) -> Sum:
        await asyncio.sleep(30)
        return {}

    exchanges = {name: make() for name in ("a", "b")}
    met = member_rounds([share("a", 0), share("b", 1)], seconds=4.0)
    if isinstance(exchanges["b"], GroupExchange):
        met = {
            name: replace(each, message=each.message.model_copy(update={"by_store": True}))
            for name, each in met.items()
        }
    monkeypatch.setattr(SumObjects, "get", slowly)
    ended = await asyncio.gather(
        *(exchanges[name].total(met[name], {WHOLE_BATCH: term(1)}) for name in exchanges),
        return_exceptions=True,
    )
    assert [each.missing for each in ended if isinstance(each, ExchangeIncomplete)] == [("b",), ()]


async def test_after_a_round_that_came_to_nothing_a_process_group_is_not_formed_again(
    make: Make, tmp_path: Path
) -> None:
    exchanges = {name: make() for name in ("a", "b")}
    met = member_rounds([share("a", 0), share("b", 1)], round_number=1)
    again = {
        name: replace(each, message=each.message.model_copy(update={"by_store": True}))
        for name, each in met.items()
    }
    sums: dict[str, Sum] = {"a": {WHOLE_BATCH: term(1)}, "b": {WHOLE_BATCH: term(2)}}
    found = await totals(exchanges, again, sums)
    assert torch.allclose(of(found[0]), of(term(1)) + of(term(2)))
    assert torch.equal(of(found[0]), of(found[1]))
    assert {each.name for each in found_in(tmp_path, "test/batches/*/exchange/*/*.json")} == {
        "a.json", "total.json",
    }  # fmt: skip


async def test_a_round_that_is_given_up_leaves_nothing_that_waits(make: Make) -> None:
    met, before = member_rounds([share("a", 0), share("b", 1)], seconds=60.0), asyncio.all_tasks()
    forming = asyncio.create_task(make().total(met["b"], {WHOLE_BATCH: term(0)}))
    await asyncio.sleep(0.5)
    forming.cancel()
    await asyncio.wait({forming}, timeout=15)
    assert forming.cancelled()
    assert asyncio.all_tasks() == before


def test_what_is_no_sum_of_this_run_is_refused() -> None:
    good = {WHOLE_BATCH: term(1), 3: Term(None, term(1).tally)}
    found = unpack_sum(pack_sum(good), LAYOUT)
    assert torch.equal(of(found[WHOLE_BATCH]), of(good[WHOLE_BATCH]))
    assert found[3].gradient is None
    other = SumLayout(size=49, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ContractError):
        unpack_sum(pack_sum(good), other)
    with pytest.raises(ContractError):
        unpack_sum(b"nothing", LAYOUT)


def test_a_sum_that_lacks_what_its_share_says_is_missed_by_name() -> None:
    """A restarted member may store a sum of other groups: the round ends, no process does."""
    shares = (share("a", 0), share("b", 1))
    for by_group, whole, lacking in (
        (False, {WHOLE_BATCH: term(1)}, {}),
        (True, {0: term(1)}, {7: term(2)}),
    ):
        round_ = member_rounds(shares, by_group=by_group)["a"]
        for sums in ({"a": whole, "b": lacking}, {"a": whole}):
            with pytest.raises(ExchangeIncomplete) as missed:
                in_order(sums, round_)
            assert missed.value.missing == ("b",)
