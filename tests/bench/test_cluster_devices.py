"""Emulated devices: how long they are held, what they give, and one thing at a time."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from bench.cluster.blobs import digest_of, samples_of, trajectory_blob
from bench.cluster.build import (
    Emulation,
    member,
    member_hosts,
    named_rollout,
    nodes,
    rollout_devices,
)
from bench.cluster.generation import EmulatedRollout
from bench.cluster.hold import Held, overshoot
from bench.cluster.ledger import entries_of
from bench.cluster.members import EmulatedMember
from bench.cluster.payloads import Payload, payload_of, scaled
from bench.cluster.scoring import EmulatedScorer
from bench.cluster.setting import Setting, recipe_of
from bench.cluster.stores import Line, NodeStore, PublishingStore
from bench.runner.figures import Interval
from services.scheduler.costs import fluid
from services.scheduler.costs.noise import Noise
from services.scheduler.costs.profile import PROFILES, Profile, load_profile
from services.scheduler.costs.seconds import fragment_seconds, gradient_seconds
from services.scheduler.sim.cluster import build
from services.scheduler.sim.profiled import make_timing, steady_plan
from shared.devices.protocols import GroupData
from shared.errors import ContractError, IntegrityError
from shared.messages.contracts import Fragment, GenerateFragment, Policy
from shared.messages.fluid import Piece
from shared.recipe.schedule import RunSchedule
from shared.store.folder import FolderBackend
from tests import examples
from tests.shared.store.hosts import Counting, process_on
from tests.stored import one_object, packed, read_back

SCALE = 500.0
SETTING = Setting(
    run="test", profile="qwen-image", rollout={"H100": 2}, trainer={"H100": 4}, scale=SCALE,
    steps=3, schedule=RunSchedule(tag="auto"),
)  # fmt: skip


def with_schedule(**keys: object) -> Setting:
    return SETTING.model_copy(update={"schedule": SETTING.schedule.changed(**keys)})


def task(samples: int = 4, batch: int = 0, digest: str = "0" * 64) -> GenerateFragment:
    policy = Policy(version=batch, weights_digest=digest)
    return examples.task(batch=batch, group=1, num_samples=samples, policy=policy, worker="w")


def whole_group(size: int = 16, group: int = 1) -> GroupData:
    fragment = Fragment(batch=0, group=group, first_sample=0, num_samples=size, attempt=0)
    samples = samples_of(task().model_copy(update={"fragment": fragment}), "0" * 64)
    return GroupData(
        trajectories=(trajectory_blob(samples, 256),), conditions=b"",
        advantages=tuple([1.0] * size),
    )  # fmt: skip


def rollout(setting: Setting = SETTING) -> EmulatedRollout:
    return rollout_devices(Emulation.of(setting))[0]


def members(setting: Setting = SETTING, profile: Profile | None = None) -> list[EmulatedMember]:
    async def ready() -> None:
        pass

    emulation = Emulation.of(setting)
    if profile is not None:
        emulation = replace(emulation, profile=profile)
    hosts = member_hosts(setting)
    return [member(emulation, device, ready) for host in hosts for device in host]


def piece(samples: range, steps: range, group: int = 1) -> Piece:
    return Piece(
        group=group, attempt=0, number=0, first_sample=samples.start, num_samples=len(samples),
        first_step=steps.start, num_steps=len(steps),
    )  # fmt: skip


async def test_a_device_is_held_for_the_seconds_over_the_scale() -> None:
    held = Held("d", scale=10)
    assert await held.hold(0.5, "generate", samples=4) == 0.05
    [interval] = held.intervals
    assert interval.end - interval.begin >= 0.05
    assert interval.samples == 4


@pytest.mark.parametrize(
    ("late", "second", "overshoot_ms"), [(0.003, 0.097, 3.0), (-0.0004, 0.1004, 0.0)]
)
async def test_what_a_sleep_took_too_long_or_too_little_is_made_up_for_by_the_work_behind_it(
    late: float, second: float, overshoot_ms: float
) -> None:
    now = 0.0
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds + late

    held = Held("d", scale=1, clock=lambda: now)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        await held.hold(0.1, "generate", samples=4)
        await held.hold(0.1, "generate", samples=4)
        now += 1.0
        await held.hold(0.1, "generate", samples=4)
    assert slept == pytest.approx([0.1, second, 0.1])
    assert [interval.samples for interval in held.intervals] == [4, 4, 4]
    assert overshoot([held]).median_ms == pytest.approx(overshoot_ms)


async def test_work_that_is_cut_off_counts_as_far_as_it_went() -> None:
    held = Held("d", scale=1)
    task = asyncio.create_task(held.hold(0.2, "generate", samples=4))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait({task})
    [interval] = held.intervals
    assert 0.9 < interval.samples / (4 * (interval.end - interval.begin) / 0.2) < 1.1


def test_service_times_are_drawn_from_the_device_s_own_seed() -> None:
    def times(name: str, seed: int) -> list[float]:
        held = Held("d", scale=1.0, noise=Noise(0.03, seed), drawn_as=name)
        return [held.drawn(1.0) for _ in range(5)]

    assert times("a", 0) == times("a", 0)
    assert times("a", 0) != times("b", 0)
    assert times("a", 0) != times("a", 1)
    assert len(set(times("a", 0))) == 5


async def test_a_fragment_takes_as_long_in_many_steps_as_in_one() -> None:
    noise = 0.5
    one, many = rollout(), rollout()
    one.held.noise, many.held.noise = Noise(noise), Noise(noise)
    many.num_steps = 4
    whole, parts = await one.begin(task()), await many.begin(task())
    await whole.advance()
    while not parts.done:
        await parts.advance()
    assert parts.seconds == pytest.approx(whole.seconds)
    mean = fragment_seconds(one.profile, one.kind, task().fragment.num_samples) / one.held.scale
    assert whole.seconds != pytest.approx(mean)


def test_devices_draw_as_the_simulator_s_do() -> None:
    setting = SETTING.model_copy(update={"rollout": {"H100": 2, "A100": 1}})
    emulation = Emulation.of(setting)
    cluster = build(
        steady_plan(emulation.profile.shape, batches=1, schedule=RunSchedule(tag=0)),
        make_timing(emulation.profile, setting.trainer),
        rollout=setting.rollout, members={"H100": 4},
    )  # fmt: skip
    rollouts = {device.held.drawn_as: device.kind for device in rollout_devices(emulation)}
    assert rollouts == {name: each.kind for name, each in cluster.rollout.items()}
    assert [each.held.drawn_as for each in members(setting)] == list(cluster.members)


async def test_a_device_does_one_thing_at_a_time() -> None:
    held = Held("d", scale=1)
    with pytest.raises(RuntimeError, match="while it is busy"):
        await asyncio.gather(held.hold(0.01, "train"), held.hold(0.01, "generate"))


async def test_a_rollout_device_generates_what_the_reward_service_reads() -> None:
    device = rollout()
    work = await device.begin(task())
    while not work.done:
        await work.advance()
    found = await work.finish()
    profile, sizes = SETTING.load_profile(), device.sizes
    mean = fragment_seconds(profile, "H100", 4) / SCALE
    assert found.seconds == pytest.approx(mean, rel=0.2)
    assert len(found.trajectory) == 4 * sizes.window
    images = safetensors.numpy.load(found.media)["images"]
    assert images.shape == (4, 1, 1, sizes.media)
    assert len(device.held.intervals) == 1, "one hold for the whole fragment"


async def test_a_member_that_can_be_lent_generates_step_by_step() -> None:
    device = members()[0].generating
    work = await device.begin(task())
    while not work.done:
        await work.advance()
    assert len(device.held.intervals) == SETTING.load_profile().shape.steps
    assert sum(each.samples for each in device.held.intervals) == pytest.approx(4)


async def test_a_fragment_is_not_finished_with_other_weights() -> None:
    device = members()[0].generating
    work = await device.begin(task())
    await work.advance()
    device.weights = "1" * 64
    with pytest.raises(IntegrityError):
        await work.advance()


async def test_adopted_weights_are_those_that_a_member_stored() -> None:
    found, device = members()[0], rollout()
    found.generating.weights = "1" * 64
    published = await found.weights()
    staged = await device.stage(read_back(published.weights))
    before = device.weights_digest()
    await staged.adopt()
    assert device.weights_digest() == staged.digest == published.digest == found.weights_digest()
    assert before != published.digest
    assert digest_of(packed(published.weights)) == published.digest
    with pytest.raises(ContractError):
        await device.stage(one_object(b"no adapter" * 100))


async def test_storing_an_adapter_takes_what_its_publication_takes(tmp_path: Path) -> None:
    lines = {"run/weights": Line(0.05 / len(b"adapter"))}
    store = PublishingStore(FolderBackend(tmp_path), lines=lines)
    began = time.monotonic()
    parts = [store.put("run/weights", each, suffix=".bin") for each in (b"ada", b"pter")]
    refs = await asyncio.gather(*parts)
    assert time.monotonic() - began >= 0.05
    assert [await store.get(ref) for ref in refs] == [b"ada", b"pter"]


async def test_devices_of_a_host_share_an_adapter_that_takes_its_time(tmp_path: Path) -> None:
    backend = Counting(tmp_path / "objects")
    store = NodeStore(
        backend, "run/weights", Line(0.05 / len(b"adapter")), cache=process_on(tmp_path / "host")
    )
    ref = await store.put("run/weights", b"adapter", suffix=".bin")
    began = time.monotonic()
    found = await asyncio.gather(*(store.get_shared(ref) for _ in range(8)))
    assert time.monotonic() - began >= 0.05
    assert [each[:] for each in found] == [b"adapter"] * 8
    assert backend.read_bytes == len(b"adapter")
    lying = ref.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(IntegrityError):
        await store.get_shared(lying)


async def test_training_takes_what_the_profile_says() -> None:
    found, profile = members(), SETTING.load_profile()
    assert len(found) == 4
    await found[0].train(whole_group(), piece(range(16), range(profile.shape.trained_steps)))
    [interval] = found[0].held.intervals
    mean = gradient_seconds(profile, "H100", 16)
    assert interval.end - interval.begin >= 0.85 * mean / SCALE  # a busy machine sleeps longer


SHARED = SETTING.load_profile().shape.model_copy(update={"shared_steps": 2.0, "merged_steps": 1})
SECOND = Fragment(batch=0, group=1, first_sample=4, num_samples=4, attempt=0)


@pytest.mark.parametrize(("steps", "rows"), [(range(1), 1), (range(3), 1 + 16 * 2)])
async def test_a_step_that_a_group_computes_once_takes_one_row(steps: range, rows: int) -> None:
    profile = SETTING.load_profile().model_copy(update={"shape": SHARED})
    found = members(profile=profile)[0]
    await found.train(whole_group(), piece(range(16), steps))
    [interval] = found.held.intervals
    seconds = fluid.piece_seconds(profile, "H100", rows) / SCALE
    assert 0.85 * seconds <= interval.end - interval.begin


def test_a_state_that_samples_share_is_stored_once_in_a_fragment() -> None:
    profile = SETTING.load_profile().model_copy(update={"shape": SHARED})
    alone, shared = payload_of(SETTING.load_profile()), payload_of(profile)
    assert alone.window == 3 * shared.start and shared.window == 2 * shared.start
    fragments = [task(4), task(4).model_copy(update={"fragment": SECOND})]
    blobs = [trajectory_blob(samples_of(each, "0" * 64), 256, 64) for each in fragments]
    group = GroupData(trajectories=tuple(blobs), conditions=b"", advantages=(1.0,) * 8)
    entries = entries_of(group, range(8), 64)
    assert [entry.origin.sample for entry in entries] == list(range(8))
    with pytest.raises(ContractError):
        entries_of(group, range(8), 63)


def test_the_recipe_of_an_emulated_run_shares_what_its_profile_shares(tmp_path: Path) -> None:
    path = tmp_path / "shared.json"
    plain = json.loads((PROFILES / "qwen-image.json").read_text())
    plain["shape"] |= {"shared_steps": 2.0, "merged_steps": 1}
    path.write_text(json.dumps(plain))
    sampling = recipe_of(SETTING.model_copy(update={"profile": str(path)}), tmp_path).sampling
    assert (sampling.shared_steps, sampling.merged_steps) == (2.0, 1)


async def test_a_group_that_is_not_whole_is_refused() -> None:
    with pytest.raises(ContractError):
        await members()[0].train(whole_group(15), piece(range(15), range(3)))


def test_scores_follow_from_the_samples() -> None:
    images = np.arange(4 * 100, dtype=np.uint8).reshape(4, 1, 1, 100)
    scores = EmulatedScorer().score(images, [{}] * 4)
    assert scores == EmulatedScorer().score(images.copy(), [{}] * 4)
    assert len(set(scores)) == 4 and all(0 <= score < 1 for score in scores)


PAYLOADS = {
    "qwen-image": Payload(3 * 16 * 64 * 64 * 2, 0, 3 * 512 * 512, 2 * 150 * 3584 * 2),
    "flux1-dev": Payload(10 * 16 * 90 * 90 * 2, 0, 3 * 720 * 720, (512 * 4096 + 768) * 2),
    "wan2.1-14b": Payload(11 * 16 * 9 * 30 * 52 * 2, 0, 33 * 3 * 240 * 416, 2 * 512 * 4096 * 2),
    "hunyuanvideo": Payload(
        10 * 16 * 14 * 60 * 60 * 2, 0, 53 * 3 * 480 * 480, (256 * 4096 + 768) * 2
    ),
}


@pytest.mark.parametrize("name", list(PAYLOADS))
def test_bytes_are_divided_by_the_scale(name: str) -> None:
    profile = load_profile(name)
    real, small = scaled(profile, 1.0, 4), scaled(profile, 10.0, 4)
    assert payload_of(profile) == PAYLOADS[name] and real.window == PAYLOADS[name].window
    for field in ("window", "media", "conditions", "adapter"):
        assert getattr(small, field) == pytest.approx(getattr(real, field) / 10, abs=1)


def test_devices_that_only_generate_are_named_by_their_kind_and_share_hosts_of_eight() -> None:
    pool = named_rollout({"H100": 1, "A100": 2})
    assert [(each.name, each.kind) for each in pool] == [
        ("rollout-00-h100", "H100"), ("rollout-01-a100", "A100"), ("rollout-02-a100", "A100"),
    ]  # fmt: skip
    devices = rollout_devices(Emulation.of(SETTING.model_copy(update={"rollout": {"H100": 18}})))
    assert [len(host) for host in nodes(devices)] == [8, 8, 2]


def test_a_worker_registers_as_what_it_is() -> None:
    emulation = Emulation.of(SETTING)
    trainer = emulation.registered("H100", "trainer", concurrency=1)
    assert trainer.concurrency == 1 and trainer.refusal is None
    assert emulation.registered("4090", "rollout", concurrency=1).refusal is not None


def test_intervals_are_written_as_they_are_read() -> None:
    interval = Interval("d", "train", 1.0, 2.0, 0.5)
    assert Interval(**interval._asdict()) == interval
