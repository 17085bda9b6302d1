import string
import zlib
from random import Random

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.errors import ContractError
from shared.limits import MAX_FRAGMENTS_PER_GROUP, MAX_MESSAGE_BYTES, MAX_SCORE, MAX_SUMS_BYTES
from shared.messages.codec import decode, encode, group_bytes
from shared.messages.contracts import (
    Fragment,
    FragmentFailed,
    FragmentReleased,
    FragmentScored,
    GroupFailed,
    GroupRequest,
    Message,
    ObjectRef,
    OperatorRequest,
    Policy,
    RunFailed,
    SetDevice,
    TagRequest,
    TrainGroup,
    Trajectories,
    WorkerRequest,
)
from shared.messages.workers import Device, DeviceLoan, MemoryShortage, WorkerStatus
from tests import examples

counts = st.integers(0, 2**63 - 1)
small = st.integers(0, 4096)
finite = st.floats(-MAX_SCORE, MAX_SCORE)
tasks = st.builds(examples.task, batch=counts, group=counts, first_sample=counts, attempt=counts)
messages: st.SearchStrategy[Message] = st.one_of(
    tasks,
    tasks.map(examples.generated),
    st.builds(examples.scored, tasks.map(lambda _: examples.task()), st.tuples(finite, finite)),
    st.builds(
        FragmentFailed,
        slot=tasks.map(lambda task: task.fragment.slot),
        stage=st.sampled_from(["rollout", "reward", "admission", "delivery"]),
        reason=st.text(max_size=200),
    ),
    st.builds(RunFailed, batch=counts, worker=st.just("trainer-0-a"), reason=st.text()),
    st.builds(GroupFailed, batch=counts, group=counts, attempt=counts, reason=st.text()),
    st.builds(
        TrainGroup,
        batch=counts,
        group=counts,
        attempt=counts,
        policy=st.just(examples.policy(3)),
        fragments=st.just((examples.scored(examples.task()),)),
        advantages=st.lists(finite, max_size=8).map(tuple),
    ),
    st.builds(
        OperatorRequest, action=st.sampled_from(["pause", "resume", "stop"]), id=st.just("x")
    ),
    st.builds(
        WorkerRequest,
        action=st.sampled_from(["drain", "undrain"]),
        worker=st.just("rollout-0"),
        id=st.just("x"),
    ),
    st.builds(GroupRequest, action=st.just("again"), batch=counts, group=counts, id=st.just("x")),
    st.just(examples.published(2)),
    st.builds(
        WorkerStatus,
        service=st.just("rollout"),
        worker=st.just("rollout-0"),
        address=st.just("rollout-0-a"),
        activity=st.just("generating"),
        num_done=counts,
        seconds=st.dictionaries(st.sampled_from(["generating", "scoring"]), st.floats(0, 1e9)),
        device=st.builds(Device, kind=st.text(max_size=50), memory_bytes=counts, concurrency=small),
        loan=st.none()
        | st.builds(DeviceLoan, generation=counts, mode=st.sampled_from(["train", "generate"])),
        memory_shortage=st.none()
        | st.builds(MemoryShortage, what=st.text(), since=st.text(), remedy=st.text()),
    ),
    st.builds(
        SetDevice,
        worker=st.just("trainer-0-a"),
        generation=counts,  # as the wire says; hypothesis reads the signature
        mode=st.sampled_from(["train", "generate"]),
        max_seconds=st.floats(0, 1e6),
        keep=st.booleans(),
    ),
    st.builds(
        FragmentReleased,
        slot=tasks.map(lambda task: task.fragment.slot),
        worker=st.just("rollout-0-a"),
        reason=st.sampled_from(["stale", "returned", "draining"]),
    ),
    st.builds(
        TagRequest, mode=st.sampled_from(["auto", "off", "fixed"]), groups=counts, id=st.just("x")
    ),
)


@given(messages)
def test_a_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=300))
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(ContractError):
        decode(data)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(st.text(), plain, max_size=4))
@example({"kind": "operator_request", "action": "pause", "id": "../x"})
@example({"kind": "operator_request", "action": "pause", "id": "x", "extra": 1})
@example({"kind": "group_failed", "batch": -1, "group": 0, "attempt": 0, "reason": ""})
@example({"kind": "group_failed", "batch": "1", "group": 0, "attempt": 0, "reason": ""})
def test_maps_that_are_no_message_are_refused(value: dict[str, object]) -> None:
    with pytest.raises(ContractError):
        decode(msgpack.packb(value))


def test_numbers_that_are_not_finite_are_refused() -> None:
    scored = examples.scored(examples.task()).model_dump()
    with pytest.raises(ContractError):
        decode(msgpack.packb({**scored, "rewards": (float("nan"), 1.0)}))


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 600 + b"\x01",  # nested
        b"\x82\xa1a\x01\xa1a\x02",  # a key twice
        b"\xc7\x00\x05",  # an extension of no length
        b"\xdd\xff\xff\xff\xff",  # an array said to be of four billion
        b"\xc1",
    ],
    ids=["nested", "repeated key", "extension", "length bomb", "reserved"],
)
def test_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ContractError):
        decode(data)


def test_a_message_too_large_for_the_bus_is_refused_by_its_sender() -> None:
    with pytest.raises(ContractError, match="exceeds"):
        encode(_worst_group(1024, 64, 8))


def test_a_message_too_large_for_its_reader_is_refused_by_its_sender() -> None:
    scored = examples.scored(examples.task(num_samples=1024))
    parts = {f"scorer-{number}": scored.rewards for number in range(32)}
    group = examples.group(*[scored.model_copy(update={"parts": parts})] * 8)
    with pytest.raises(ContractError, match="exceeds"):
        encode(group)


def test_only_sums_may_be_larger_than_other_messages() -> None:
    scored = examples.scored(examples.task(num_samples=1024))
    group = examples.group(*[scored] * 4)
    plain = msgpack.packb(group.model_dump())
    stored = zlib.compress(plain, 0)
    assert decode(zlib.compress(plain)) == group
    assert MAX_MESSAGE_BYTES < len(stored) < MAX_SUMS_BYTES
    with pytest.raises(ContractError, match="too large"):
        decode(stored)


def _worst_group(samples: int, fragments: int, scorers: int) -> TrainGroup:
    """Names as long as they may be and nothing in common, but for the run's own."""
    random = Random(samples * fragments + scorers)

    def name() -> str:
        return "a" + "".join(random.choices(string.ascii_letters + string.digits + "_-", k=63))

    def number() -> int:
        return random.randrange(2**62, 2**63)

    def values(count: int) -> tuple[float, ...]:
        return tuple(random.uniform(-1e6, 1e6) for _ in range(count))

    def ref(folder: str, suffix: str) -> ObjectRef:
        digest = f"{random.getrandbits(256):064x}"
        return ObjectRef(key=f"{run}/{folder}/{digest}{suffix}", sha256=digest, size=number())

    def part(first: int, count: int) -> FragmentScored:
        return FragmentScored(
            fragment=Fragment(
                batch=batch, group=group, first_sample=first, num_samples=count, attempt=number()
            ),
            policy=policy,
            stored=Trajectories(
                trajectory=ref(f"batches/{batch:08d}", ".safetensors"),
                conditions=ref("conditions", ".safetensors"),
                media=ref(f"batches/{batch:08d}", ".media.safetensors"),
                weights_digest=policy.weights_digest,
            ),
            rewards=values(count),
            parts={scorer: values(count) for scorer in names},
            generated_by=name(),
            worker=name(),
            seconds=random.uniform(0, 1e5),
        )

    run, batch, group = name(), number(), number()
    names = [name() for _ in range(scorers)]
    policy = Policy(version=number(), weights_digest=f"{random.getrandbits(256):064x}")
    size = -(-samples // fragments)
    return TrainGroup(
        batch=batch,
        group=group,
        attempt=number(),
        policy=policy,
        fragments=tuple(
            part(first, min(size, samples - first)) for first in range(0, samples, size)
        ),
        advantages=values(samples),
    )


@pytest.mark.parametrize(
    ("samples", "fragments", "scorers"),
    [(2, 1, 1), (2, 2, 32), (64, 64, 3), (64, 64, 32), (900, 64, 1), (1024, 1, 4), (24, 24, 4)],
)
def test_a_group_of_the_worst_names_fits_what_is_reckoned_for_it(
    samples: int, fragments: int, scorers: int
) -> None:
    message = _worst_group(samples, fragments, scorers)
    data = encode(message)
    assert len(data) <= group_bytes(samples, fragments, scorers)
    assert decode(data) == message


def test_64_fragments_of_one_sample_with_three_scorers_fit_one_message() -> None:
    assert group_bytes(64, MAX_FRAGMENTS_PER_GROUP, 3) < MAX_MESSAGE_BYTES
    assert len(encode(_worst_group(64, 64, 3))) < MAX_MESSAGE_BYTES


def test_a_small_message_that_unpacks_to_a_large_one_is_refused() -> None:
    bomb = zlib.compress(b"\x00" * 40_000_000)
    assert len(bomb) < MAX_MESSAGE_BYTES
    with pytest.raises(ContractError, match="zlib"):
        decode(bomb)


@pytest.mark.parametrize("damage", [slice(0, 500), slice(0, -1), slice(5, None)])
def test_a_packed_message_that_is_cut_short_is_none(damage: slice) -> None:
    data = encode(_worst_group(64, 64, 1))
    with pytest.raises(ContractError):
        decode(data[damage])
