"""A vision-language model as the judge, behind any endpoint that speaks OpenAI's chat completions.

The prompt contains one image, or frames of a video, after the source image if there is one, and
requests a number from 0 to ``highest``; the score is that number over ``highest``, from 0 to 1. Its
answer has to end in a line with the number, ``Score:`` before it or not, or to rate each axis of a
published question: anything else fails the scoring and is never taken for a number.
"""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from services.reward import limits
from services.reward.scorer import SOURCES, Media, Metadata
from services.reward.scorers.endpoint import ask, read_key, without
from services.reward.scorers.inputs import picture, prompts
from shared.errors import ScoringError
from shared.process.outgoing import CheckedTransport, check_url
from shared.recipe.rewards import Judge
from shared.recipe.rubrics import PUBLISHED

NUMBER = re.compile(r"(?:(?:final )?score:\s*)?([0-9]+(?:\.[0-9]+)?)", re.IGNORECASE)
RATING = re.compile(r"(\w+) Score \(1-5\):\s*([0-9]+(?:\.[0-9]+)?)")
MAX_SHOWN = 200
"""Characters of an answer that an error quotes."""


class Message(BaseModel):
    content: str


class CompletionChoice(BaseModel):
    message: Message
    finish_reason: str | None = None


class Completion(BaseModel):
    """Is the part of an answer that is read."""

    choices: list[CompletionChoice] = Field(min_length=1)


class JudgeScorer:
    def __init__(self, url: str, judge: Judge, *, patience: float) -> None:
        """``url`` is the API's, such as http://host:8000/v1; ``patience`` is how many seconds an
        answer may take.

        Raises:
            UserError: if the key that the recipe names is missing, or no recipe may have that
                server asked.
        """
        check_url(url)
        self._url = url.rstrip("/") + "/chat/completions"
        self._judge = judge
        self._patience = patience
        self._key = read_key(judge)

    def score(self, images: Media, metadata: Metadata) -> list[float]:
        """Returns scores from 0 to 1; `at_once` images are judged at a time.

        Raises:
            ScoringError: if the endpoint refuses, or returns no number for a sample.
            ValueError: if an image has no prompt.
        """
        texts = prompts(metadata)
        sources = [source_images(each) for each in metadata]
        with self._client() as client, ThreadPoolExecutor(self._judge.at_once) as threads:
            futures = [
                threads.submit(self._ask, client, *each)
                for each in zip(images, texts, sources, strict=True)
            ]
            try:
                return [each.result() for each in futures]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _client(self) -> httpx.Client:
        return httpx.Client(
            headers={"authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(self._patience, connect=min(limits.CONNECT_S, self._patience)),
            transport=CheckedTransport(
                self._url, httpx.Limits(max_connections=self._judge.at_once)
            ),
        )

    def _ask(
        self,
        client: httpx.Client,
        image: npt.NDArray[np.uint8],
        text: str,
        sources: Sequence[npt.NDArray[np.uint8]],
    ) -> float:
        body = request(self._judge, image, text, sources)
        answer = ask(client, self._url, patience=self._patience, secret=self._key, json=body)
        try:
            return score_in(said(answer), self._judge)
        except ValueError as error:
            raise ScoringError(f"{self._url}: {without(self._key, str(error))}") from None


def shown(judge: Judge, sample: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Returns what a request shows (n, C, H, W) of an image (C, H, W) or a video (F, C, H, W)."""
    if sample.ndim == 3:
        return sample[None]
    num = min(judge.frames or 1, len(sample))
    places = np.linspace(0, len(sample) - 1, num).round().astype(int)
    if judge.rubric in PUBLISHED:  # as its authors' code chooses
        places = np.arange(num) * len(sample) // num
    chosen: npt.NDArray[np.uint8] = sample[places]
    return chosen


def source_images(given: Mapping[str, object]) -> Sequence[npt.NDArray[np.uint8]]:
    """Returns the images (C, H, W) that a sample edits, of its metadata."""
    images: Any = given.get(SOURCES, ())
    return tuple(images)


def request(
    judge: Judge,
    sample: npt.NDArray[np.uint8],
    text: str,
    sources: Sequence[npt.NDArray[np.uint8]] = (),
) -> dict[str, object]:
    """Builds the request about an image (C, H, W) or a video (F, C, H, W); the images that it
    edits come before it. A published question comes after what it asks about."""
    question = judge.prompt.replace("{highest}", f"{judge.highest:g}").replace("{prompt}", text)
    images = [*sources, *shown(judge, sample)]
    content = [
        {"type": "text", "text": question},
        *({"type": "image_url", "image_url": {"url": data_url(image)}} for image in images),
    ]
    if judge.rubric in PUBLISHED:
        content = [*content[1:], content[0]]
    messages = [{"role": "user", "content": content}]
    return {**judge.options, "model": judge.model, "messages": messages, "stream": False}


def data_url(image: npt.NDArray[np.uint8]) -> str:
    """Encodes an image (C, H, W) as PNG, without loss."""
    buffer = io.BytesIO()
    picture(image).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def said(body: bytes) -> str:
    """Returns the text of the judge in an answer of the endpoint.

    Raises:
        ValueError: if the answer is no completion, or was cut off: part of a number would be
            another number.
    """
    try:
        choice = Completion.model_validate_json(body).choices[0]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise ValueError(f"no completion: {where}: {first['msg'].lower()}") from None
    if choice.finish_reason == "length":
        raise ValueError("the answer was cut off; raise max_tokens in judge.options")
    return choice.message.content


def score_in(answer: str, judge: Judge) -> float:
    """Returns the number of an answer over the best one; of a published question, the mean of its
    axes. Raises ValueError if one is missing."""
    axes = PUBLISHED.get(judge.rubric or "")
    if axes is None:
        return number_in(answer, judge.highest) / judge.highest
    rated = dict(RATING.findall(answer))
    numbers = [float(rated.get(axis, "nan")) for axis in axes]
    if not all(0 <= number <= judge.highest for number in numbers):
        raise ValueError(
            f"the answer does not rate {', '.join(axes)} from 0 to {judge.highest:g}: "
            f"{answer[-MAX_SHOWN:]!r}"
        )
    return sum(numbers) / len(axes) / judge.highest


def number_in(answer: str, highest: float) -> float:
    """Returns the number in the last line, from 0 to ``highest``.

    >>> number_in("It is sharp.\\nScore: 7.5", 10)
    7.5

    Raises:
        ValueError: if anything else is there.
    """
    lines = answer.strip().splitlines() or [""]
    match = NUMBER.fullmatch(lines[-1].strip())
    if match is None or float(match[1]) > highest:
        raise ValueError(
            f"the answer does not end in a number from 0 to {highest:g}: {answer[-MAX_SHOWN:]!r}"
        )
    return float(match[1])
