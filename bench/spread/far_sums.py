"""A round of sums among two near members and a far one, which has trained most pieces."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from bench.spread.far_line import FarLine
from bench.spread.network import network
from bench.spread.run import PATIENCE_S, Plan, _answering, _brokers, _process, _received
from services.trainer.fluid.exchange import WHOLE_BATCH, Exchange, MemberRound
from services.trainer.fluid.group_exchange import GroupExchange
from services.trainer.fluid.store_exchange import StoreExchange
from services.trainer.fluid.sums import SumLayout, Term
from shared.diffusion.training.tally import Tally
from shared.messages.contracts import Policy
from shared.messages.fluid import ExchangeSums, Piece, Share
from shared.telemetry import quiet_logs

Transport = Literal["store", "group"]
NUM_PIECES = {"near-0": 3, "near-1": 3, "far": 6}
TRIAL_BYTES = 2 << 20
"""Object by which each member's line is measured."""

Rates = tuple[float | None, float | None]
"""Bytes per second of a member's line, up and down; None: not measured."""


def trained_shares() -> tuple[Share, ...]:
    """Return who has trained what."""
    shares, group = [], 0
    for worker, number in NUM_PIECES.items():
        pieces = [
            Piece(group=each, attempt=0, number=0, first_sample=0, num_samples=1, first_step=0,
                  num_steps=1) for each in range(group, group + number)
        ]  # fmt: skip
        shares.append(Share(worker=worker, sum_number=0, pieces=tuple(pieces)))
        group += number
    return tuple(shares)


def measure_sums(
    line: FarLine, *, size: int, transport: Transport, folder: Path,
    choose: Callable[[Mapping[str, Rates]], tuple[str, bool]],
) -> dict[str, float]:  # fmt: skip
    """Return the seconds until each member holds the total of sums of ``size`` bytes.

    Args:
        choose: returns the committer, and whether sums go by the store, by the members' rates.
    """
    quiet_logs()
    with (
        network([None, None, None, line]) as (first, *hosts),
        _brokers(first, folder) as settings,
        ExitStack() as stack,
    ):
        pipes = {}
        for name, host in zip(NUM_PIECES, hosts, strict=True):
            own = settings.model_copy(update={"worker": name})
            plan = Plan(host=host, settings=own, size=size, versions=1)
            work = partial(exchange, transport=transport)
            pipes[name] = stack.enter_context(_process(work, plan))
        rates = {name: _received(pipe) for name, pipe in pipes.items()}
        committer, by_store = choose(rates)
        message = ExchangeSums(
            batch=0, attempt=0, round=0, policy=Policy(version=0, weights_digest="0" * 64),
            committer=committer, by_store=by_store, shares=trained_shares(),
            max_seconds=PATIENCE_S, update=0,
        )  # fmt: skip
        for pipe in pipes.values():
            pipe.send(message.model_dump_json())
        return {name: _received(pipe) for name, pipe in pipes.items()}


async def exchange(plan: Plan, pipe: Connection, *, transport: Transport) -> None:
    """Measure this member's line, and take part in the round."""
    store, me = await _answering(plan.settings), plan.settings.worker
    ref = await store.put("run/trial", os.urandom(TRIAL_BYTES), suffix=".bin")
    await store.get(ref)
    pipe.send((store.traffic.up.rate, store.traffic.down.rate))
    layout = SumLayout(size=plan.size // 4, dtype=torch.float32, device=torch.device("cpu"))
    by: Exchange = StoreExchange(store, layout)
    if transport == "group":
        by = GroupExchange(store, layout, plan.host.address)
    own = {WHOLE_BATCH: Term(torch.randn(layout.size), Tally(num_rows=1).as_dict())}
    text: Any = await asyncio.to_thread(pipe.recv)
    began = time.monotonic()
    message = ExchangeSums.model_validate_json(text)
    await by.total(MemberRound.from_message(message, plan.settings.run, me, by_group=False), own)
    pipe.send(time.monotonic() - began)
    await asyncio.sleep(PATIENCE_S)
