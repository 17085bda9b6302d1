"""Members that round what they send, and publish versions as rounded changes."""

import asyncio
import random
from functools import partial
from typing import Any

import pytest
import torch

from services.trainer.fluid.exchange import WHOLE_BATCH, ExchangeIncomplete, MemberRound, Sum
from services.trainer.fluid.residuals import Residuals
from services.trainer.fluid.store_exchange import StoreExchange
from services.trainer.fluid.sums import pack_sum, round_gradient
from shared.diffusion.policy import load_policy
from shared.diffusion.sampling.tensors import pack, unpack
from shared.diffusion.weights.rounding import rounded
from shared.diffusion.weights.trained_weights import Staging
from shared.messages.fluid import ExchangeSums, TakeStep
from shared.messages.records import ExchangeLevels, Level
from shared.run.commits import CommitRecord
from shared.run.manifest import FetchedObject
from shared.run.shards import open_tensors
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests import examples
from tests.trainer.fluid.director import Director, Start, whole
from tests.trainer.fluid.test_exchange import LAYOUT, member_rounds, of, share, term, totals

LEVELS: tuple[Level, ...] = ("int8", "int4")


def rounds_at(level: Level, *args: Any, **keys: Any) -> dict[str, MemberRound]:
    met = member_rounds(*args, **keys)
    for name, each in met.items():
        message = each.message.model_copy(update={"up": level})
        met[name] = MemberRound.from_message(message, "test", name, by_group=each.by_group)
    return met


@pytest.fixture
def store(tmp_path: Any) -> ObjectStore:
    return ObjectStore(FolderBackend(tmp_path))


def step_of(message: ExchangeSums) -> TakeStep:
    return TakeStep(
        batch=message.batch, attempt=message.attempt, update=message.update, round=message.round,
        sum_id=examples.digest(1), norm=1.0, finite=True, scale=1.0, committer="b",
    )  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
async def test_all_members_hold_the_bits_of_one_total_of_rounded_sums(
    store: ObjectStore, level: Level
) -> None:
    exchanges = {name: StoreExchange(store, LAYOUT) for name in "abc"}
    met = rounds_at(level, [share("a", 0), share("b", 1), share("c", 2)])
    sums: dict[str, Sum] = {name: {WHOLE_BATCH: term(n)} for n, name in enumerate("abc")}
    found = await totals(dict(exchanges), met, sums)
    wanted = rounded(of(term(0)), level) + of(term(1)) + rounded(of(term(2)), level)
    assert all(torch.allclose(of(each), wanted, atol=1e-6) for each in found)
    assert len({tuple(of(each).tolist()) for each in found}) == 1


@pytest.mark.parametrize("level", LEVELS)
async def test_in_deterministic_mode_a_total_does_not_depend_on_who_has_trained_a_group(
    store: ObjectStore, level: Level
) -> None:
    found = []
    divided: list[dict[str, tuple[int, ...]]] = [
        {"b": (0, 1, 2)}, {"a": (1,), "b": (0,), "c": (2,)}
    ]  # fmt: skip
    for batch, groups in enumerate(divided):
        names = list(groups)
        shares = [share(name, *groups[name]) for name in names]
        met = rounds_at(level, shares, batch=batch, by_group=True)
        sums: dict[str, Sum] = {n: {g: term(g) for g in groups[n]} for n in names}
        exchanges = {name: StoreExchange(store, LAYOUT) for name in names}
        found.append((await totals(dict(exchanges), met, sums))[0])
    assert torch.equal(of(found[0]), of(found[1]))


def message(batch: int, attempt: int = 0, number: int = 0, update: int = 0) -> ExchangeSums:
    shares = (share("a", 0), share("b", 1))
    return ExchangeSums(
        batch=batch, attempt=attempt, round=number, update=update, policy=examples.policy(batch),
        committer="b", shares=shares, max_seconds=1.0, up="int4",
    )  # fmt: skip


def sent(residuals: Residuals, about: ExchangeSums, gradient: torch.Tensor) -> torch.Tensor:
    found = residuals.add(about, gradient, partial(round_gradient, level=about.up))
    assert isinstance(found, torch.Tensor)
    return found


def test_what_rounding_leaves_counts_once_its_step_is_ordered() -> None:
    residuals, gradient = Residuals(), of(term(1))
    first = sent(residuals, message(0), gradient)
    assert torch.equal(sent(residuals, message(0, number=1), gradient), first), "no step: again"
    residuals.count(step_of(message(0)))  # of a round that another has ended
    assert torch.equal(sent(residuals, message(0, number=2), gradient), first)
    residuals.count(step_of(message(0, number=2)))
    second = sent(residuals, message(1), gradient)
    assert torch.equal(second, rounded(gradient + (gradient - first), "int4"))


def test_a_step_that_is_never_committed_leaves_what_was_left_before() -> None:
    residuals, gradient = Residuals(), of(term(1))
    first = sent(residuals, message(0), gradient)
    residuals.count(step_of(message(0)))
    lost = sent(residuals, message(1), gradient)
    residuals.count(step_of(message(1)))
    again = sent(residuals, message(1, attempt=1), gradient)
    assert torch.equal(again, lost) and not torch.equal(again, first)
    residuals.count(step_of(message(1, attempt=1)))
    rest = gradient + (gradient - first) - again
    third = sent(residuals, message(2), gradient)
    assert torch.equal(third, rounded(gradient + rest, "int4"))


def test_a_committer_adds_what_was_left_and_leaves_nothing() -> None:
    residuals, gradient = Residuals(), of(term(1))
    first = sent(residuals, message(0), gradient)
    residuals.count(step_of(message(0)))
    own = residuals.add(message(1), gradient, lambda whole: whole)
    assert torch.equal(own, gradient + (gradient - first))
    residuals.count(step_of(message(1)))
    assert torch.equal(sent(residuals, message(2), gradient), first)


def faulty(kind: str) -> bytes:
    found = unpack(pack_sum({WHOLE_BATCH: term(0)}, "int8"))
    codes, exponents = "gradient/-1/codes", "gradient/-1/exponents"
    if kind == "of other weights":
        found[codes] = found[codes].repeat(2, 1)
        found[exponents] = found[exponents].repeat(2)
    elif kind == "not finite":
        found[exponents] = torch.full_like(found[exponents], 127)
    else:
        found["more"] = torch.zeros(4096)
    return pack(found)


@pytest.mark.parametrize("kind", ["of other weights", "not finite", "larger than dense"])
async def test_a_faulty_sum_ends_the_round_and_names_its_member(
    store: ObjectStore, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanges = {name: StoreExchange(store, LAYOUT) for name in "ab"}
    met = rounds_at("int8", [share("a", 0), share("b", 1)], seconds=2.0)
    monkeypatch.setattr(
        "services.trainer.fluid.store_exchange.pack_sum", lambda own, level: faulty(kind)
    )
    sums: dict[str, Sum] = {name: {WHOLE_BATCH: term(0)} for name in "ab"}
    results = await asyncio.gather(
        *(exchanges[name].total(met[name], sums[name]) for name in "ab"), return_exceptions=True
    )
    assert isinstance(results[1], ExchangeIncomplete)
    assert results[1].missing == ("a",)


async def trained(director: Director, batch: int, names: str) -> CommitRecord:
    """Train a batch of three groups, each with one of the members, update by update."""
    recipe, updates = director.recipe, director.recipe.trainer.updates
    await director.open(batch, by=names[0])
    size = recipe.batch.groups // updates
    for update in range(updates):
        parts: dict[str, list[Any]] = {name: [] for name in names}
        for group in range(update * size, (update + 1) * size):
            parts[names[group % len(names)]].append(whole(recipe, group))
        await director.update(batch, update, parts, committer=names[batch % len(names)])
    return await director.record(batch + 1)


@pytest.mark.parametrize("updates", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("level", [LEVELS[0], pytest.param(LEVELS[1], marks=pytest.mark.slow)])
async def test_versions_are_changes_of_one_another_and_records_name_how_they_were_rounded(
    direct: Start, level: Level, updates: int
) -> None:
    changes = {"exchange__down": level, "exchange__up": level, "trainer__updates": updates}
    async with direct(**changes) as director:
        await director.start("a", "b")
        records = [await director.record(0)]
        records += [await trained(director, batch, "ab") for batch in range(2)]
        assert [each.exchange for each in records] == [
            ExchangeLevels(), *[ExchangeLevels(down=level, up=level)] * 2
        ]  # fmt: skip
        generating = load_policy(director.recipe, {"transformer"})
        for record in records:
            ref, change = record.weights, record.weights.change
            assert (change is None) == (record.policy.version == 0)
            if change is not None:
                assert change.base == records[record.policy.version - 1].policy.weights_digest
                assert change.ref.size < ref.size / (3 if level == "int8" else 5)
                ref = change.ref
            staging = Staging(generating.model.transformer, is_change=change is not None)
            async for part in (await open_tensors(director.store, ref)).parts():
                staging.add(FetchedObject(part.data, part.pieces))
            digest = generating.in_use.adopt(staging.finish())
            assert digest == record.policy.weights_digest


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"trainer__updates": 3}, id="on-policy, three updates", marks=pytest.mark.slow
        ),
        pytest.param({"schedule__max_staleness": 1}, id="one step ahead", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
async def test_killed_members_make_the_versions_of_a_calm_one_to_the_last_bit(
    direct: Start, level: Level, changes: dict[str, Any]
) -> None:
    keys = {"exchange__down": level, "exchange__up": level, "trainer__deterministic": True}
    made: list[list[tuple[str, str | None]]] = []
    for folder, names in (("calm", "a"), ("killed", "ab")):
        draw, records = random.Random(level), []
        async with direct(folder, **keys, **changes) as director:
            await director.start(*names)
            for batch in range(4):
                records.append(await trained(director, batch, names))
                if folder == "killed":
                    victim = draw.choice(names)
                    await director.kill(victim)
                    await director.start(victim)
        made.append([(each.policy.weights_digest, each.checksum) for each in records])
    assert made[0] == made[1]
