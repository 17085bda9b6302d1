"""A scorer that runs elsewhere, behind `POST /score`.

Every sample gets the score that the server has given it, or none.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from services.reward import limits
from services.reward.scorer import SOURCES, Media, Metadata
from services.reward.scorers.endpoint import ask, read_key, without
from services.reward.wire import (
    MSGPACK,
    Pixels,
    ScoreRequest,
    ScoreResponse,
    WireResult,
    WireSample,
    decode,
    encode,
)
from shared.errors import ContractError, SamplesFailed, ScoringError
from shared.process.outgoing import CheckedTransport, check_url
from shared.recipe.rewards import Remote

DEFAULTS = Remote()


class RemoteScorer:
    def __init__(self, url: str, settings: Remote = DEFAULTS, *, patience: float) -> None:
        """``url`` is the server's, without the path; ``patience`` is how many seconds an answer may
        take.

        Raises:
            UserError: if the key that the recipe names is missing, or no recipe may have that
                server asked.
        """
        check_url(url)
        self._url = url.rstrip("/") + "/score"
        self._patience = patience
        self._size = settings.batch
        self._key = read_key(settings)
        headers = {"content-type": MSGPACK, "accept": MSGPACK}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        self._client = httpx.Client(
            headers=headers, timeout=limits.SILENCE_TIMEOUT_S, transport=CheckedTransport(url)
        )
        """Client that keeps its connection from request to request."""
        weakref.finalize(self, self._client.close)

    def score(self, media: Media, metadata: Metadata) -> list[float]:
        """Returns one score per sample.

        Raises:
            SamplesFailed: if the server could not score some.
            ScorerUnavailable: if there is no answer for too long.
            ScoringError: if the server refuses, or its results are not of these samples.
        """
        items = [
            WireSample(
                id=str(index),
                dtype="uint8" if sample.dtype == np.uint8 else "float32",
                shape=sample.shape,
                data=np.ascontiguousarray(sample).tobytes(),
                metadata={key: value for key, value in given.items() if key != SOURCES},
                source_images=_sources(given),
            )
            for index, (sample, given) in enumerate(zip(media, metadata, strict=True))
        ]
        results: list[WireResult] = []
        for first in range(0, len(items), self._size):
            results += self._ask(items[first : first + self._size])
        scores = [result.score for result in results]
        faults = {n: each.error for n, each in enumerate(results) if each.error is not None}
        if faults:
            reasons = {n: without(self._key, fault.detail) for n, fault in faults.items()}
            final = [n for n, fault in faults.items() if fault.type == "bad-item"]
            raise SamplesFailed(scores, reasons, final)
        return [score for score in scores if score is not None]

    def _ask(self, items: Sequence[WireSample]) -> Sequence[WireResult]:
        body = encode(ScoreRequest(items=tuple(items)))
        try:
            results = decode(self._post(body), ScoreResponse).results
        except ContractError as error:
            message = without(self._key, str(error))
            raise ScoringError(f"{self._url} gave no results: {message}") from None
        if [result.id for result in results] != [item.id for item in items]:
            raise ScoringError(f"{self._url} gave results of other items")
        return results

    def _post(self, body: bytes) -> bytes:
        """Sends a request until there is an answer."""
        return ask(self._client, self._url, patience=self._patience, secret=self._key, content=body)


def _sources(given: Mapping[str, Any]) -> tuple[Pixels, ...]:
    """Returns the source images among a sample's metadata."""
    return tuple(
        Pixels(shape=each.shape, data=np.ascontiguousarray(each, np.uint8).tobytes())
        for each in given.get(SOURCES, ())
    )
