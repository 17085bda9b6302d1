"""A real HTTP server that speaks as much of OpenAI's chat completions as a judge needs."""

import base64
import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from tests.http_server import QuietHandler, serving


@dataclass(frozen=True)
class Asked:
    path: str
    authorization: str | None
    body: dict[str, Any]

    @property
    def question(self) -> str:
        return str(self.body["messages"][0]["content"][0]["text"])

    @property
    def image(self) -> npt.NDArray[np.uint8]:
        """(H, W) or (H, W, 3)."""
        url = self.body["messages"][0]["content"][1]["image_url"]["url"]
        kind, data = url.split(",")
        assert kind == "data:image/png;base64"
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


@dataclass(frozen=True)
class Reply:
    body: str | bytes
    status: int = 200
    pause_s: float = 0.0
    """Seconds between two bytes of the answer."""


def completion(text: str | None, finish_reason: str = "stop") -> Reply:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return Reply(json.dumps({"id": "c", "object": "chat.completion", "choices": [choice]}))


@dataclass
class Endpoint:
    url: str
    asked: list[Asked] = field(default_factory=list)
    encodings: list[str | None] = field(default_factory=list)
    """What each request accepts the answer packed as."""


@contextmanager
def endpoint(reply: Callable[[Asked], Reply | None]) -> Iterator[Endpoint]:
    """Answers each request as ``reply`` says; None hangs up without an answer."""

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked = Asked(self.path, self.headers["authorization"], body)
            made.asked.append(asked)
            made.encodings.append(self.headers["accept-encoding"])
            answer = reply(asked)
            if answer is None:
                self.close_connection = True
                return
            data = answer.body.encode() if isinstance(answer.body, str) else answer.body
            self.send_response(answer.status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client may have left
                self._send(data, answer.pause_s)

        def _send(self, data: bytes, pause_s: float) -> None:
            step = 1 if pause_s else max(1, len(data))
            for first in range(0, len(data), step):
                self.wfile.write(data[first : first + step])
                self.wfile.flush()
                time.sleep(pause_s)

    with serving(Handler) as url:
        made = Endpoint(f"{url}/v1")
        yield made
