"""Rights to publish and read messages: the one description of each role's rights on NATS.

A service connects as the user of its role, and NATS refuses it everything else. `role_permissions`
translates them for NATS: subjects that a user may publish to and subscribe to.

    scheduler   commands, and makes the streams
    rollout     generates; publishes its own kinds of results
    encoder     looks for new versions
    reward      takes what was generated, publishes scores
    trainer     announces versions; generates while its device is lent; fluid members train (the
                scheduler announces again what was lost)
    client      reads events

A message counts only under its own subject (`shared.messages.subjects.message_subject`), so who may
not publish to a subject cannot send such a message under another one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from shared.messages import contracts, fluid, workers
from shared.messages.records import Record
from shared.messages.subjects import COMMANDED, STREAMS, TASK, TRAJ, UNSCORED, Stream

Role = Literal["scheduler", "rollout", "encoder", "reward", "trainer", "client"]
ROLES: tuple[Role, ...] = get_args(Role)
WORKERS: tuple[Role, ...] = ("rollout", "encoder", "reward", "trainer")


@dataclass(frozen=True, slots=True)
class Right:
    """Publishers and readers of a kind of message; the scheduler reads all."""

    kind: type[Record]
    subject: str
    """Matches all its subjects, of every run."""
    publishers: tuple[Role, ...]
    readers: tuple[Role, ...] = ()

    @property
    def stream(self) -> Stream | None:
        """Where it is stored, if it is."""
        word = self.subject.split(".")[2]
        return next((each for each in STREAMS if each.subjects[0] == f"dg.*.{word}.>"), None)


_BOTH: tuple[Role, ...] = ("rollout", "trainer")
_SCHEDULER: tuple[Role, ...] = ("scheduler",)
_TRAINER: tuple[Role, ...] = ("trainer",)

RIGHTS = (
    Right(contracts.GenerateFragment, "dg.*.task.>", _SCHEDULER, _BOTH),
    Right(contracts.TrainGroup, "dg.*.train.>", _SCHEDULER, _TRAINER),
    Right(contracts.SetDevice, "dg.*.device.*", _SCHEDULER, _TRAINER),
    Right(fluid.TrainPiece, "dg.*.fluid.*.piece.>", _SCHEDULER, _TRAINER),
    Right(fluid.ExchangeSums, "dg.*.fluid.*.exchange.>", _SCHEDULER, _TRAINER),
    Right(fluid.TakeStep, "dg.*.fluid.*.step.>", _SCHEDULER, _TRAINER),
    Right(fluid.CommitVersion, "dg.*.fluid.*.commit.>", _SCHEDULER, _TRAINER),
    Right(fluid.BeginAgain, "dg.*.fluid.*.again.>", _SCHEDULER, _TRAINER),
    Right(contracts.FragmentGenerated, "dg.*.traj.>", _BOTH, ("reward", "client")),
    Right(contracts.FragmentScored, "dg.*.rew.>", ("reward",)),
    Right(fluid.PieceTrained, "dg.*.fluid.*.trained.>", _TRAINER),
    Right(fluid.PieceReleased, "dg.*.fluid.*.trained.>", _TRAINER),
    Right(fluid.SumHeld, "dg.*.fluid.*.sum.>", _TRAINER),
    Right(fluid.ExchangeMissed, "dg.*.fluid.*.sum.>", _TRAINER),
    Right(fluid.Stepped, "dg.*.fluid.*.stepped.>", _TRAINER),
    Right(fluid.Stepped, "dg.*.fluid.*.reference.>", _TRAINER, _TRAINER),
    Right(fluid.WeightsStored, "dg.*.fluid.*.stored.>", _TRAINER),
    Right(contracts.FragmentReleased, "dg.*.evt.fragment_released", _BOTH, ("client",)),
    Right(contracts.FragmentFailed, "dg.*.evt.fragment_failed.rollout", _BOTH, ("client",)),
    Right(contracts.FragmentFailed, "dg.*.evt.fragment_failed.reward", ("reward",), ("client",)),
    Right(contracts.FragmentFailed, "dg.*.evt.fragment_failed.admission", _TRAINER, ("client",)),
    Right(contracts.GroupFailed, "dg.*.evt.group_failed", _TRAINER, ("client",)),
    Right(
        contracts.PolicyPublished,
        "dg.*.evt.policy_published",
        (*_SCHEDULER, *_TRAINER),
        (*WORKERS, "client"),
    ),
    Right(contracts.RunFailed, "dg.*.evt.run_failed", _TRAINER, ("client",)),
    Right(contracts.OperatorRequest, "dg.*.evt.operator_request", _SCHEDULER, ("client",)),
    Right(contracts.TagRequest, "dg.*.evt.tag_request", _SCHEDULER, ("client",)),
    Right(contracts.WorkerRequest, "dg.*.evt.worker_request", _SCHEDULER, ("client",)),
    Right(contracts.GroupRequest, "dg.*.evt.group_request", _SCHEDULER, ("client",)),
    Right(workers.WorkerRefused, "dg.*.refused.*", _SCHEDULER, WORKERS),
    *(Right(workers.WorkerStatus, f"dg.*.live.{role}.*", (role,)) for role in WORKERS),
)
SHARED_WORK: dict[Role, Stream] = {"reward": TRAJ}
"""Streams whose messages the workers of a role share, each taken by one worker."""

SCHEDULER_PUBLISHES = (
    "$JS.API.INFO", "$JS.API.STREAM.CREATE.*", "$JS.API.STREAM.UPDATE.*", "$JS.API.STREAM.PURGE.*",
    "$JS.API.STREAM.INFO.*", "$JS.API.STREAM.LIST", "$JS.API.STREAM.MSG.GET.*",
    "$JS.API.STREAM.MSG.DELETE.*",
    "$JS.API.DIRECT.GET.>", "$JS.API.CONSUMER.CREATE.>", "$JS.API.CONSUMER.DELETE.*.*", "$KV.>",
    "dg.*.quarantine.*.*", "dg.*.*.epoch.*",
)  # fmt: skip
"""Further rights of the scheduler: it makes and empties streams, but deletes and restores no
stream; it marks its epochs, and holds its lease."""


@dataclass(frozen=True, slots=True)
class Permissions:
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def inbox_subject(user: str) -> str:
    """Return the subject below which a user receives responses; no other user may subscribe
    there."""
    return f"_INBOX.{user}"


def role_permissions(role: Role) -> Permissions:
    """Return all that NATS lets a role do."""
    mine = [right for right in RIGHTS if role in right.publishers]
    read = [right for right in RIGHTS if role in right.readers]
    publish = {right.subject for right in mine} | set(_read_slots(mine)) | set(_reading(read))
    publish |= {f"$JS.API.STREAM.INFO.{stream.name}" for stream in STREAMS}
    listen = {right.subject for right in read if right.stream is None}
    if role == "scheduler":
        publish |= set(SCHEDULER_PUBLISHES)
        listen |= {"dg.*.live.>"}
    if role == "client":
        listen |= {"dg.*.evt.>", "dg.*.traj.>"}
    if role in SHARED_WORK:
        publish |= {*_sharing(SHARED_WORK[role]), f"dg.*.quarantine.{UNSCORED}.*"}
        publish.add(f"$JS.API.STREAM.MSG.GET.{TASK.name}")  # what a result is to be judged by
    return Permissions(tuple(sorted(publish)), tuple(sorted({f"{inbox_subject(role)}.>", *listen})))


def _read_slots(mine: list[Right]) -> Iterator[str]:
    """A publisher that finds a slot taken reads the message in it."""
    for right in mine:
        if right.stream is not None and right.stream.slots:
            yield f"$JS.API.STREAM.MSG.GET.{right.stream.name}"


def _reading(read: list[Right]) -> Iterator[str]:
    """A reader of a stream is a consumer that its user makes, for what it may read of it."""
    for stream in STREAMS:
        of_it = {right.subject for right in read if right.stream == stream}
        making = f"$JS.API.CONSUMER.CREATE.{stream.name}.*"
        yield from (f"{making}.{subject}" for subject in of_it)
        if len(of_it) > 1 or (of_it and stream in COMMANDED):
            yield making  # of several subjects, as marks of epochs and commands, it names none
        if of_it and stream not in SHARED_WORK.values():
            yield f"$JS.API.CONSUMER.DELETE.{stream.name}.*"
        if of_it:
            yield f"dg.*.quarantine.{stream.name}.*"


def _sharing(stream: Stream) -> Iterator[str]:
    for word in ("INFO", "MSG.NEXT"):
        yield f"$JS.API.CONSUMER.{word}.{stream.name}.*"
    yield f"$JS.ACK.{stream.name}.*.>"
