"""Serves a function of the caller's process as a scorer: `POST /score`, as `digenrl serve-scorer`.

The function names what it takes, as the function of a reward file does: `image` (H, W, C) or
`frames` (F, H, W, C), uint8; `prompt`; `metadata`; any other name is a value of the prompt's
metadata.
"""

import hmac
import inspect
import logging
import math
import secrets
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Media = npt.NDArray[np.generic]

Reward = Callable[..., float]
MEDIA = ("image", "frames")
MAX_DETAIL = 2000
"""Characters of an error that a run stores."""

log = logging.getLogger("digenrl")


class RewardServer(ThreadingHTTPServer):
    """Answers on loopback who has the token, and calls the function once at a time."""

    daemon_threads = True

    def __init__(self, function: Reward, port: int = 0) -> None:
        """Raises TypeError if the function takes neither an image nor frames."""
        parameters = inspect.signature(function).parameters.values()
        named = [
            each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        self.names = [each.name for each in named]
        self.needed = [each.name for each in named if each.default is each.empty]
        if not set(self.names) & set(MEDIA):
            raise TypeError(f"reward: {function!r} takes neither `image` nor `frames`")
        self.function = function
        self.token = secrets.token_urlsafe(32)
        self.error: Exception | None = None
        """The first error of the function."""
        self._calls = threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def score(self, media: "Media", metadata: Mapping[str, Any]) -> float:
        """Return the score of one sample; of a function of images, the mean over a video.

        Args:
            media: pixels (H, W, C) or (F, H, W, C).
            metadata: metadata of the prompt, and its text as "prompt".

        Raises:
            TypeError: if the metadata lack what the function takes, or it returned no number.
            Exception: any error of the function.
        """
        if "image" in self.names and media.ndim == 4:
            return math.fsum(self.score(each, metadata) for each in media) / len(media)
        given = {**metadata, "metadata": metadata, "image": media, "frames": media}
        if missing := [name for name in self.needed if name not in given]:
            raise TypeError(f"reward: takes {missing[0]!r}, which is not in the prompt's metadata")
        score = float(self.function(**{name: given[name] for name in self.names if name in given}))
        if not math.isfinite(score):
            raise TypeError(f"reward: returned {score}, which is not a finite number")
        return score

    def results(self, body: bytes) -> bytes:
        """Return the results of a request, both as services/reward/wire.py defines them."""
        import msgpack

        items = msgpack.unpackb(body)["items"]
        with self._calls:
            packed: bytes = msgpack.packb({"results": [self._result(each) for each in items]})
        return packed

    def _result(self, item: Mapping[str, Any]) -> dict[str, Any]:
        import numpy as np

        pixels = np.frombuffer(item["data"], item["dtype"]).reshape(item["shape"])
        try:
            score = self.score(np.moveaxis(pixels, -3, -1).copy(), item["metadata"])
            return {"id": item["id"], "score": score}
        except Exception as error:
            if self.error is None:
                self.error = error
                log.exception("the reward function failed; the run continues without such samples")
            detail = f"{type(error).__name__}: {error}"[:MAX_DETAIL]
            return {"id": item["id"], "error": {"type": "scoring", "detail": detail}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, RewardServer)
        body = self.rfile.read(int(self.headers["content-length"]))
        given = self.headers.get("authorization", "")
        is_allowed = hmac.compare_digest(given, f"Bearer {server.token}")
        answer = server.results(body) if is_allowed else b""
        self.send_response(200 if is_allowed else 401)
        self.send_header("content-type", "application/msgpack")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Print no line per request."""
