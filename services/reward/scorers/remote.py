"""A scorer that runs elsewhere, behind `POST /score`.

Asks again, for as long as its patience lasts, when there is no answer or the server is not well;
what the server refuses is not asked again. Every sample gets the score that the server gave for it,
or none: nothing is made up.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import structlog

from services.reward.wire import MSGPACK, Item, ScoreRequest, decode_response, encode
from shared.errors import ContractError, ScorerUnavailable, ScoringError

log = structlog.get_logger()

ITEMS_AT_ONCE = 32
REQUEST_S = 60.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
BUSY = 429


class RemoteScorer:
    def __init__(self, url: str, *, patience: float) -> None:
        """``url``: of the server, without the path. ``patience``: seconds without an answer."""
        self._url = url.rstrip("/") + "/score"
        self._patience = patience

    def score(
        self, media: npt.NDArray[Any], metadata: Sequence[Mapping[str, object]]
    ) -> list[float]:
        """NaN for one that the server could not score.

        Raises:
            ScorerUnavailable: if there is no answer for too long.
            ScoringError: if the server refuses, or gives other than results of these.
        """
        items = [
            Item(
                id=str(index),
                dtype="uint8" if sample.dtype == np.uint8 else "float32",
                shape=sample.shape,
                data=np.ascontiguousarray(sample).tobytes(),
                metadata=dict(given),
            )
            for index, (sample, given) in enumerate(zip(media, metadata, strict=True))
        ]
        scores: list[float] = []
        for first in range(0, len(items), ITEMS_AT_ONCE):
            scores += self._ask(items[first : first + ITEMS_AT_ONCE])
        return scores

    def _ask(self, items: Sequence[Item]) -> list[float]:
        body = encode(ScoreRequest(items=tuple(items)), MSGPACK)
        try:
            results = decode_response(self._post(body), MSGPACK).results
        except ContractError as error:
            raise ScoringError(f"{self._url} gave no results: {error}") from error
        if [result.id for result in results] != [item.id for item in items]:
            raise ScoringError(f"{self._url} gave results of other items")
        for result in results:
            if result.error is not None:
                log.warning("no_score", item=result.id, reason=result.error.detail)
        return [math.nan if result.score is None else result.score for result in results]

    def _send(self, body: bytes) -> httpx.Response:
        headers = {"content-type": MSGPACK}
        return httpx.post(self._url, content=body, headers=headers, timeout=REQUEST_S)

    def _post(self, body: bytes) -> bytes:
        """Until there is an answer."""
        deadline, wait = time.monotonic() + self._patience, FIRST_WAIT_S
        while True:
            reason = ""
            try:
                response = self._send(body)
                if response.is_success:
                    return response.content
                reason = f"{response.status_code}: {response.text[:500]}"
                if not response.is_server_error and response.status_code != BUSY:
                    raise ScoringError(f"{self._url} refuses: {reason}")
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
            if time.monotonic() + wait > deadline:
                raise ScorerUnavailable(f"{self._url}: no score in {self._patience:.0f} s ({reason})")
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)
