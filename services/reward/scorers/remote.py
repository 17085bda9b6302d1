"""A scorer that runs elsewhere, behind `POST /score`.

Every sample gets the score that the server gave for it, or none: nothing is made up.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import structlog

from services.reward.scorers.patience import ask
from services.reward.wire import MSGPACK, Item, ScoreRequest, decode_response, encode
from shared.errors import ContractError, ScoringError

log = structlog.get_logger()

ITEMS_AT_ONCE = 32
REQUEST_S = 60.0


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
        return ask(lambda: self._send(body), at=self._url, patience=self._patience).content
