"""JetStream of the NATS server in memory: its API, and what it answers publishers and workers."""

import base64
import json
from collections.abc import Callable
from typing import Any

from tests.world.nats_consumers import Consumer, Pull, Push
from tests.world.nats_streams import (
    DEFAULTS,
    DISK_FULL,
    NO_MESSAGE,
    NO_STREAM,
    ApiError,
    NoAnswer,
    Server,
    Stream,
    iso,
    matcher,
    parse,
)

NO_CONSUMER = 404, 10014, "consumer not found"
OTHER_NAME = 400, 10056, "stream name in subject does not match request"
OTHER_SETTINGS = 400, 10058, "stream name already in use with a different configuration"
Json = dict[str, Any]


class JetStream(Server):
    """The part of the server that stores."""

    def __init__(self, room: int) -> None:
        self.room, self.is_full = room, False
        """Bytes that streams may have in all; whether the disk has none left, after which a stream
        that could not write answers no publisher until the server is started again."""
        self.streams: dict[str, Stream] = {}
        self._push_consumers: dict[str, Push] = {}
        """Consumers by the subject that they deliver to."""
        self._stream_of: dict[str, Stream | None] = {}
        self._last_created = 0
        """Time at which the newest stream was made: no two are made at the same."""

    def recover(self) -> None:
        """Start with what is in the files."""
        self._push_consumers = {}
        for stream in self.streams.values():
            stream.consumers = {n: c for n, c in stream.consumers.items() if c.restart()}
            stream.recover()

    def roll_back(self, time: float) -> None:
        self.streams = {name: s for name, s in self.streams.items() if s.created <= time}
        self._stream_of.clear()
        for stream in self.streams.values():
            stream.roll_back(time)

    def interest_changed(self, subject: str, is_active: bool) -> None:
        """Subscribers of a subject are there, or none any more."""
        if subject in self._push_consumers:
            self._push_consumers[subject].interest_changed(is_active)

    def handle(self, subject: str, reply: str, header: bytes, data: bytes) -> bool:
        """Process a message if it is for JetStream; return whether it was."""
        words = subject.split(".")
        if not subject.startswith(("$JS.API.", "$JS.ACK.")):
            return self._store(subject, reply, header, data)
        is_ack = words[1] == "ACK"
        if not is_ack and words[2:5] != ["CONSUMER", "MSG", "NEXT"]:
            self._call(words[2:], reply, data)
            return True
        stream, name, *_ = [*words[2 if is_ack else 5 :], "", ""]
        consumer = self.streams[stream].consumers.get(name) if stream in self.streams else None
        if not isinstance(consumer, Pull):
            return False
        if not is_ack:
            consumer.request(reply, parse(data))
        elif len(words) == 9 and words[5].isdigit():
            consumer.acknowledge(int(words[5]), data)
            self.deliver(reply, reply, "", b"", b"")
        return True

    def _store(self, subject: str, reply: str, header: bytes, data: bytes) -> bool:
        if subject not in self._stream_of:
            found = (each for each in self.streams.values() if each.matches(subject))
            self._stream_of[subject] = next(found, None)
        stream = self._stream_of[subject]
        if stream is None:
            return False
        try:
            answer = stream.publish(subject, header, data)
        except NoAnswer:
            return True
        if reply:
            self.deliver(reply, reply, "", b"", answer)
        return True

    def _call(self, words: list[str], reply: str, data: bytes) -> None:
        count = 3 if words[1:2] == ["MSG"] else 2
        name = "_".join(words[:count]).lower()
        if name not in CALLS:
            return
        answer: Json = {"type": f"io.nats.jetstream.api.v1.{name}_response"}
        try:
            answer |= CALLS[name](self, words[count:], parse(data))
        except ApiError as error:
            answer["error"] = error.error
        self.deliver(reply, reply, "", b"", json.dumps(answer).encode())

    # Streams

    def _stream(self, name: str) -> Stream:
        if name not in self.streams:
            raise ApiError(*NO_STREAM)
        return self.streams[name]

    def _config(self, name: str, request: Json) -> Json:
        if request.get("name") != name:
            raise ApiError(*OTHER_NAME)
        notes = ("no_ack", "metadata")
        config = {**DEFAULTS, **{key: value for key, value in request.items() if key not in notes}}
        if config["max_age"]:
            config["duplicate_window"] = min(config["duplicate_window"], config["max_age"])
        taken = sum(max(0, s.config["max_bytes"]) for s in self.streams.values() if s.name != name)
        if taken + config["max_bytes"] > self.room:
            raise ApiError(500, 10047, "insufficient storage resources available")
        return config

    def _info(self, stream: Stream) -> Json:
        return {
            "config": stream.config, "created": iso(stream.created), "state": stream.state(),
            "ts": iso(self.wall()),
        }  # fmt: skip

    def stream_create(self, words: list[str], request: Json) -> Json:
        name = words[0]
        known, config = self.streams.get(name), self._config(name, request)
        if known is None:
            if self.is_full:
                raise ApiError(500, 10049, "error creating store for stream")
            self._last_created = max(self.wall(), self._last_created + 1000)
            known = self.streams[name] = Stream(self, config, self._last_created)
            self._stream_of.clear()
        elif config != known.config:
            raise ApiError(*OTHER_SETTINGS)
        return {**self._info(known), "did_create": True}

    def stream_update(self, words: list[str], request: Json) -> Json:
        stream = self._stream(words[0])
        stream.configure(self._config(words[0], request))
        self._stream_of.clear()
        return self._info(stream)

    def stream_info(self, words: list[str], request: Json) -> Json:
        return {**self._info(self._stream(words[0])), "total": 0, "offset": 0, "limit": 0}

    def stream_list(self, words: list[str], request: Json) -> Json:
        wanted = matcher([request.get("subject", ">")])
        found = [
            s for _, s in sorted(self.streams.items()) if any(map(wanted, s.config["subjects"]))
        ]
        infos = [self._info(each) for each in found]
        return {"streams": infos, "total": len(infos), "offset": 0, "limit": 256}

    def stream_purge(self, words: list[str], request: Json) -> Json:
        stream = self._stream(words[0])
        if self.is_full or stream.is_read_only:
            raise ApiError(500, 10051, DISK_FULL)
        return {"success": True, "purged": stream.purge(request)}

    def stream_msg_get(self, words: list[str], request: Json) -> Json:
        stream, subject = self._stream(words[0]), request.get("last_by_subj")
        seq = request.get("seq", 0)
        found = stream.last_of(subject) if subject else stream.messages.get(seq)
        if found is None:
            raise ApiError(*NO_MESSAGE)
        message = {"subject": found.subject, "seq": found.seq, "time": iso(found.time)}
        for name, block in (("hdrs", found.header), ("data", found.data)):
            if block:
                message[name] = base64.b64encode(block).decode()
        return {"message": message}

    def stream_msg_delete(self, words: list[str], request: Json) -> Json:
        stream, seq = self._stream(words[0]), request.get("seq", 0)
        if self.is_full or stream.is_read_only:
            raise ApiError(500, 10057, DISK_FULL)
        if seq not in stream.messages:
            raise ApiError(400, 10043, f"sequence {seq} not found")
        stream.remove(seq)
        return {"success": True}

    # Consumers

    def _consumer(self, words: list[str]) -> Consumer:
        found = self._stream(words[0]).consumers.get(words[1])
        if found is None:
            raise ApiError(*NO_CONSUMER)
        return found

    def consumer_create(self, words: list[str], request: Json) -> Json:
        stream, name = self._stream(words[0]), words[1]
        config = {"max_deliver": -1, **request.get("config", {}), "name": name}
        made = stream.consumers.get(name)
        if made is not None:
            made.config = {**made.config, **config}
            return made.info()
        if 0 <= stream.config["max_consumers"] <= len(stream.consumers):
            raise ApiError(400, 10026, "maximum consumers limit reached")
        if (self.is_full or stream.is_read_only) and not config.get("mem_storage"):
            raise ApiError(500, 10012, "error creating store for consumer")
        return self._make_consumer(stream, config).info()

    def _make_consumer(self, stream: Stream, config: Json) -> Consumer:
        if not config.get("deliver_subject"):
            made: Consumer = Pull(self, stream, config)
        else:
            made = self._push_consumers[config["deliver_subject"]] = Push(self, stream, config)
        stream.consumers[made.name] = made
        return made

    def consumer_info(self, words: list[str], request: Json) -> Json:
        return self._consumer(words).info()

    def consumer_delete(self, words: list[str], request: Json) -> Json:
        gone = self._consumer(words)
        del self.streams[words[0]].consumers[gone.name]
        gone.delete()
        if isinstance(gone, Push):
            self._push_consumers.pop(gone.to, None)
        return {"success": True}


CALLS: dict[str, Callable[[JetStream, list[str], Json], Json]] = {
    name: getattr(JetStream, name)
    for name in (
        "stream_create", "stream_update", "stream_info", "stream_list", "stream_purge",
        "stream_msg_get", "stream_msg_delete", "consumer_create", "consumer_info",
        "consumer_delete",
    )
}  # fmt: skip
