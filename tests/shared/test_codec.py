import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.codec import decode, encode
from shared.contracts import (
    Device,
    DeviceLoan,
    FragmentFailed,
    FragmentReleased,
    GroupFailed,
    GroupTrained,
    Message,
    OperatorRequest,
    SetDevice,
    TagRequest,
    TrainGroup,
    WorkerStatus,
)
from shared.errors import ContractError
from tests import examples

counts = st.integers(0, 2**63 - 1)
small = st.integers(0, 4096)
finite = st.floats(allow_nan=False, allow_infinity=False)
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
    st.just(examples.published(2)),
    st.builds(
        WorkerStatus,
        service=st.just("rollout"),
        worker=st.just("rollout-0"),
        address=st.just("rollout-0-a"),
        activity=st.just("generating"),
        num_done=counts,
        seconds=st.dictionaries(st.sampled_from(["generating", "scoring"]), st.floats(0, 1e9)),
        device=st.builds(Device, kind=st.text(max_size=50), memory_bytes=counts, slots=small),
        loan=st.none()
        | st.builds(DeviceLoan, generation=counts, mode=st.sampled_from(["train", "generate"])),
    ),
    st.builds(
        SetDevice,
        worker=st.just("trainer-0-a"),
        generation=counts,
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
        GroupTrained,
        batch=counts,
        group=counts,
        attempt=counts,
        worker=st.just("trainer-0-a"),
        seconds=st.floats(0, 1e6),
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
    scored = tuple(examples.scored(examples.task()) for _ in range(200))
    group = TrainGroup(
        batch=0, group=0, attempt=0, policy=examples.policy(0), fragments=scored, advantages=()
    )
    with pytest.raises(ContractError, match="exceeds"):
        encode(group)
