"""The process in which a reward function of the user's own runs: `python python_child.py`.

It needs numpy and nothing of ours, so that it also runs in an environment of its own. The parent
sends frames: four bytes with the length of a header, the header as JSON, and a body of the length
in the header. The first frame is the file, the others are requests. Answers are lines of JSON:

    {"ready": true} or {"failed": "NameError: ..."}                  after the first frame
    {"sample": 3, "score": 0.5} or {"sample": 3, "error": "..."}     per sample; with "final":
        true
                                                                     it is not tried again
    {"done": true}                                                   after a request

Output that the function prints goes to the error stream. The process ends when its parent does.
"""

import json
import linecache
import math
import os
import queue
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np

MAX_REASON = 300
NAME = "reward_file"
"""Name of the user's file as a module."""


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    frames: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=read_frames, args=(os.dup(0), frames), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def answer(**fields: Any) -> None:
        out.write(json.dumps(fields) + "\n")

    header, text = frames.get()
    try:
        function = load(header["path"], header["function"], text.decode())
    except BaseException as error:  # it is anybody's code, and may also call sys.exit
        answer(failed=describe_error(error))
        return
    answer(ready=True)
    while True:
        header, data = frames.get()
        serve(function, header, data, answer)
        answer(done=True)


def read_frames(descriptor: int, frames: Any) -> None:
    stream = os.fdopen(descriptor, "rb")
    while True:
        length = stream.read(4)
        if len(length) < 4:
            os._exit(0)  # the parent has ended, or wants nothing more
        header = json.loads(stream.read(int.from_bytes(length, "big")))
        frames.put((header, stream.read(header["bytes"])))


def load(path: str, name: str, text: str) -> Any:
    """Runs the text as a module; errors show its lines as lines of that file."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != here]
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    module = types.ModuleType(NAME)
    module.__file__ = path
    sys.modules[NAME] = module
    exec(compile(text, path, "exec"), module.__dict__)
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{name} is no function")
    return function


def serve(function: Any, header: Any, data: bytes, answer: Any) -> None:
    """Answers one request: its samples, and after them the prompt's source images."""

    def pixels(shape: list[int], start: int) -> tuple[Any, int]:
        """Channels come before rows on the wire, and last in the function."""
        size = int(np.prod(shape))
        flat = np.frombuffer(data, np.uint8, count=size, offset=start)
        return np.array(np.moveaxis(flat.reshape(shape), -3, -1), order="C"), start + size

    media, start = pixels(header["shape"], 0)
    sources = []
    for shape in header["sources"]:
        source, start = pixels(shape, start)
        sources.append(source)
    metadata = header["metadata"]
    values = {"prompt": header["prompt"], "metadata": metadata, "source_images": sources}
    call = Call(function, header, {**metadata, **values})
    if header["media"] in ("images", "videos"):
        for sample, outcome in enumerate(call.of_many(media)):
            answer(sample=sample, **outcome)
    else:
        for sample in range(len(media)):
            answer(sample=sample, **call.of_one(media[sample]))


class Call:
    """Calls the function with what it asks for by name."""

    def __init__(self, function: Any, header: Any, given: dict[str, Any]) -> None:
        self.function, self.given = function, given
        self.media, self.needed = header["media"], header["needed"]
        self.names = header["needed"] + header["optional"]

    def __call__(self, media: Any) -> Any:
        given = {**self.given, self.media: media}
        missing = [name for name in self.needed if name not in given]
        if missing:
            raise KeyError(f"{missing[0]} is not in the prompt's metadata")
        return self.function(**{name: given[name] for name in self.names if name in given})

    def of_one(self, media: Any) -> dict[str, Any]:
        """Returns what comes of one sample; of a function of images, the mean over a video."""
        try:
            check_shape(self.media, media.ndim)
            if self.media == "image" and media.ndim == 4:
                return mean([outcome(self(frame)) for frame in media])
            return outcome(self(media))
        except BaseException as error:
            return {"error": describe_error(error)}

    def of_many(self, media: Any) -> list[dict[str, Any]]:
        """Returns what comes of each sample of one call."""
        try:
            check_shape(self.media, media.ndim - 1)
            if self.media == "images" and media.ndim == 5:
                num_frames = media.shape[1]
                frames = media.reshape(-1, *media.shape[2:])
                results = outcomes(self(frames), len(frames))
                return [
                    mean(results[n : n + num_frames]) for n in range(0, len(results), num_frames)
                ]
            return outcomes(self(media), len(media))
        except BaseException as error:
            return [{"error": describe_error(error)}] * len(media)


def check_shape(media: str, dimensions: int) -> None:
    if media in ("frames", "videos") and dimensions != 4:
        raise ValueError(f"it asks for {media}, and these samples are images")


def outcomes(scores: Any, wanted: int) -> list[dict[str, Any]]:
    if isinstance(scores, (dict, set)):
        raise TypeError(f"it returned a {type(scores).__name__}; return a list with a number each")
    if not hasattr(scores, "__iter__"):
        raise TypeError(
            f"it returned one {type(scores).__name__}; return a list with a number each"
        )
    values = list(scores)
    if len(values) != wanted:
        reason = f"it returned {len(values)} scores for {wanted} samples"
        return [{"error": reason, "final": True}] * wanted
    return [outcome(score) for score in values]


def outcome(score: Any) -> dict[str, Any]:
    try:
        return {"score": number(score)}
    except (TypeError, ValueError) as error:
        return {"error": describe_error(error)}


def mean(frames: list[dict[str, Any]]) -> dict[str, Any]:
    for each in frames:
        if "error" in each:
            return each
    return {"score": math.fsum(each["score"] for each in frames) / len(frames)}


def number(score: Any) -> float:
    """Return a finite float, also for an array of one number; a boolean, a text or an array of
    several numbers is an error."""
    if isinstance(score, (bool, str, bytes)):
        raise TypeError(f"it returned {score!r}, which is no number; return a float")
    try:
        value = float(score.item() if hasattr(score, "item") else score)
    except OverflowError:
        value = float("inf")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"it returned a {type(score).__name__}, which is no number") from error
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(f"it returned {value}, which is no finite number")
    return value


def describe_error(error: BaseException) -> str:
    """Returns one line: the error, and the user's file and the line that it came from."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == NAME:
            line = f"{Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    text = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
    return text if line is None else f"{text} ({line})"


if __name__ == "__main__":
    main()
