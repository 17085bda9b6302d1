"""Messages that nobody should believe, sent with the rights of a worker's role."""

import random
from typing import Literal, get_args

import nats.errors
from nats.aio.client import Client

from shared.messages.codec import encode
from shared.messages.contracts import (
    Fragment,
    FragmentGenerated,
    ObjectRef,
    Policy,
    PolicyPublished,
    Prompt,
    Trajectories,
)
from shared.messages.subjects import subject_of
from shared.messages.workers import WorkerStatus
from tests.storm.cluster import Cluster

Forger = Literal["rollout", "reward", "trainer", "encoder"]
FORGERS: tuple[Forger, ...] = get_args(Forger)
NOWHERE = ObjectRef(key="small/batches/nowhere", sha256="0" * 64, size=1)
NOBODY = "forger-00000000"
ATTEMPTS = (0, 7)
"""Attempts whose slots are taken: one that is needed now, or one that nobody needs yet."""


async def forge(run: Cluster, role: Forger, draw: random.Random) -> None:
    """Send a message that is none, or is not true; nothing if NATS is away."""
    batch = max(0, await run.num_commits() - 1)
    subject, data = draw.choice(_forgeries(run, role, batch, draw))
    url = run.secrets[role]["DIGENRL_NATS_URL"]
    client = Client()
    try:
        await client.connect(url, allow_reconnect=False, connect_timeout=2)
        await client.publish(subject, data)
        await client.flush(2)
    except (nats.errors.Error, OSError):
        return
    finally:
        await client.close()  # also where it has not got further than a socket


def _forgeries(
    run: Cluster, role: Forger, batch: int, draw: random.Random
) -> list[tuple[str, bytes]]:
    name = run.recipe.run.name
    status = WorkerStatus(service=role, worker="forger", address=NOBODY, activity="starting")
    group = draw.randrange(run.recipe.batch.groups)
    fragment = Fragment(
        batch=batch, group=group, first_sample=0, num_samples=2, attempt=draw.choice(ATTEMPTS)
    )
    noise = draw.randbytes(draw.randrange(1, 400))
    found = [(subject_of(name, status), noise)]
    if role != "trainer":
        found.append((subject_of(name, status), encode(status)))
    if role in ("rollout", "trainer"):
        policy = Policy(version=batch, weights_digest="0" * 64)
        generated = FragmentGenerated(
            fragment=fragment,
            policy=policy,
            prompt=Prompt(text="forged"),
            stored=Trajectories(
                trajectory=NOWHERE, conditions=NOWHERE, media=NOWHERE, weights_digest="0" * 64
            ),
            worker=NOBODY,
            seconds=0.1,
        )
        slot = subject_of(name, generated)
        found += [(slot, encode(generated)), (slot, noise), (f"dg.{name}.evt.group_failed", noise)]
    if role == "trainer":
        policy = Policy(version=1 << 40, weights_digest="0" * 64)
        published = PolicyPublished(
            policy=policy, weights=NOWHERE, worker=NOBODY, seconds=0.0, checksum=None
        )
        found.append((subject_of(name, published), encode(published)))
    return found
