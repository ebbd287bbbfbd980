"""Mixed traffic, seeded: messages that differ in topic, size, key, headers and kind, encoded for each protocol.

Real programs send no runs of equal messages. Payload sizes are log-uniform from 20 to 2,000 bytes; there are 50 topics.
The encoders import nothing of the server, so that a figure runs unchanged on every tree that is to be compared.
"""

import base64
import json
import random
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple
from urllib.parse import quote, urlencode

from bench.workload import PAYLOAD

SEED = 20
TOPICS = 50
SIZE_MIN, SIZE_MAX = 20, 2_000
HEADERS_MAX = 8
KEYS = 5_000
KEYED_SHARE = 0.7
EPOCH_MS = 1_700_000_000_000

Kind = Literal["json", "text", "bytes"]
Chunks = list[tuple[bytes, int]]
"""Encoded messages that are written together, and how many."""

WORDS = ("plant", "line", "temp", "Wärme", "order", "sensor", "flow", "ok", "état", "belt", "7f3a", "näher", "item")
HEADER_NAMES = [
    f"{front}-{back}" for front in ("x", "trace", "app", "geo") for back in ("id", "at", "by", "zone", "rev")
]


class Message(NamedTuple):
    """A message before any protocol; the payload is UTF-8 unless the kind is bytes."""

    topic: str
    key: str | None
    headers: dict[str, str]
    kind: Kind
    payload: bytes


def topics(*, uniform: bool = False) -> list[str]:
    return [f"mixed/{number:02}" for number in range(1 if uniform else TOPICS)]


def messages(count: int, *, seed: int = SEED, uniform: bool = False) -> list[Message]:
    """Return mixed messages, always the same for a seed; or messages that are all alike."""
    if uniform:
        return [Message(topics()[0], None, {}, "text", PAYLOAD)] * count
    draw = random.Random(seed)
    names = topics()
    return [
        Message(
            draw.choice(names),
            f"{draw.choice(WORDS)}/{draw.randrange(KEYS)}" if draw.random() < KEYED_SHARE else None,
            {name: _header_value(draw) for name in draw.sample(HEADER_NAMES, draw.randint(0, HEADERS_MAX))},
            *_payload(draw),
        )
        for _ in range(count)
    ]


def _header_value(draw: random.Random) -> str:
    # ASCII, because HTTP headers are ASCII.
    return draw.choice((str(draw.randrange(10**6)), f"{draw.getrandbits(128):032x}", f"line {draw.randrange(40)}"))


def _size(draw: random.Random) -> int:
    return int(SIZE_MIN * (SIZE_MAX / SIZE_MIN) ** draw.random())


def _payload(draw: random.Random) -> tuple[Kind, bytes]:
    size, share = _size(draw), draw.random()
    if share < 0.15:
        return "bytes", draw.randbytes(size)
    if share < 0.4:
        return "text", _text(draw, size).encode()
    return "json", _compact(json_value(draw, size))


def _text(draw: random.Random, size: int) -> str:
    return " ".join(draw.choices(WORDS, k=size // 3 + 1)).encode()[:size].decode(errors="ignore")


def json_value(draw: random.Random, size: int) -> object:
    """Return an object of about `size` bytes whose members differ in name, number and type."""
    value: dict[str, object] = {}
    left = size - 2
    while left > 8:
        member: object = _text(draw, min(left - 8, 150))
        if left > 60:
            number, unit = draw.randrange(10**6), draw.choice(WORDS)
            numbers = [draw.randrange(1000) for _ in range(min(left // 10, 30))]
            member = draw.choice(
                (number, number / 1000, number < 10, None, numbers, member, {"unit": unit, "at": number})
            )
        name = f"{draw.choice(WORDS)[:2]}{len(value)}"
        value[name] = member
        left -= len(name) + 4 + len(_compact(member))
    return value


def _compact(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def chunked(requests: Sequence[bytes], size: int) -> Chunks:
    """Return requests joined, `size` of them at a time."""
    return [(b"".join(part), len(part)) for part in (requests[at : at + size] for at in range(0, len(requests), size))]


# -- zbus ------------------------------------------------------------------------------------------------------------


def zbus_frames(batch: Iterable[Message]) -> list[bytes]:
    """Return WebSocket frames that publish; a quarter have the blanks and escapes of Python's json module."""
    draw = random.Random(SEED)
    return [websocket_frame(_zbus_json(draw, number, message), draw) for number, message in enumerate(batch)]


def _zbus_json(draw: random.Random, number: int, message: Message) -> bytes:
    headers = {"cmd": "pub", "mq": message.topic, "id": f"{draw.getrandbits(128):032x}"}
    if message.key is not None:
        headers["tag" if number % 2 else "key"] = message.key
    headers |= message.headers
    body: object
    if message.kind == "bytes":
        headers |= {"content-type": "application/octet-stream", "content-encoding": "base64"}
        body = base64.b64encode(message.payload).decode()
    else:
        body = message.payload.decode() if message.kind == "text" else json.loads(message.payload)
    frame = {"headers": headers, "body": body}
    return json.dumps(frame).encode() if message.headers and number % 4 == 0 else _compact(frame)


def zbus_command(cmd: str, draw: random.Random, **headers: str) -> bytes:
    return websocket_frame(_compact({"headers": {"cmd": cmd, **headers}}), draw)


def websocket_frame(text: bytes, draw: random.Random) -> bytes:
    """Return a text frame of a client, masked with a mask of its own."""
    size, mask = len(text), draw.randbytes(4)
    head = bytes((0x81, 0x80 | size)) if size < 126 else struct.pack(">BBH", 0x81, 0xFE, size)
    masks = (mask * (size // 4 + 1))[:size]
    return head + mask + (int.from_bytes(text, "big") ^ int.from_bytes(masks, "big")).to_bytes(size, "big")


def http_requests(batch: Iterable[Message]) -> list[bytes]:
    """Return HTTP requests that publish: POST by headers, POST by query (two of five each), and the browser's GET."""
    draw = random.Random(SEED)
    return [_http_request(draw, number, message) for number, message in enumerate(batch)]


CONTENT_TYPES = {"json": "application/json", "text": "text/plain; charset=utf-8", "bytes": "application/octet-stream"}


def _http_request(draw: random.Random, number: int, message: Message) -> bytes:
    command = {"cmd": "pub", "mq": message.topic, "id": f"{draw.getrandbits(64):016x}"}
    headers = {"Host": "localhost", "User-Agent": f"client/{number % 7}", **message.headers}
    form, body = number % 5, message.payload
    if form == 4:
        command["body"] = body.decode(errors="replace")
        return _http_head("GET", f"/?{urlencode(command)}", headers)
    if form in (0, 1):
        headers |= command
        if message.key is not None:
            headers["tag"] = quote(message.key)
    headers |= {"Content-Type": CONTENT_TYPES[message.kind], "Content-Length": str(len(body))}
    return _http_head("POST", "/" if form in (0, 1) else f"/?{urlencode(command)}", headers) + body


def _http_head(method: str, target: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode()


# -- Wörterbuch ------------------------------------------------------------------------------------------------------


def worterbuch_publications(batch: Iterable[Message], *, uniform: bool = False) -> list[bytes]:
    """Return lines that set a key below each message's topic; mixed traffic alternates set and publish."""
    return [
        worterbuch_line(
            "set" if uniform or number % 2 else "publish",
            transactionId=number + 1,
            key=f"{message.topic}/{message.key or 'value'}",
            value=json.loads(message.payload) if message.kind == "json" else message.payload.decode(errors="replace"),
        )
        for number, message in enumerate(batch)
    ]


def worterbuch_line(name: str, **members: object) -> bytes:
    return _compact({name: members}) + b"\n"


def worterbuch_requests(count: int) -> list[bytes]:
    """Return lines of set (half), cSet, publish, get and delete; every get and delete names a key with a value."""
    return list(_worterbuch_requests(random.Random(SEED), count))


def _worterbuch_requests(draw: random.Random, count: int) -> Iterator[bytes]:
    keys: list[str] = []  # that have a value
    present: set[str] = set()
    versions: dict[str, int] = {}
    for number in range(1, count + 1):
        share = draw.random()
        key = f"{draw.choice(WORDS)}/{draw.randrange(TOPICS)}/{draw.randrange(KEYS)}"
        if share < 0.25 and keys:
            at = draw.randrange(len(keys))
            if share < 0.15:
                yield worterbuch_line("get", transactionId=number, key=keys[at])
            else:
                deleted, keys[at] = keys[at], keys[-1]
                keys.pop()
                present.remove(deleted)
                yield worterbuch_line("delete", transactionId=number, key=deleted)
            continue
        value = _any_value(draw)
        if share < 0.4:
            yield worterbuch_line("publish", transactionId=number, key=key, value=value)
        elif share < 0.5:
            key = f"versions/{number % 500}"
            version = versions.get(key, 0)
            versions[key] = version + 1
            yield worterbuch_line("cSet", transactionId=number, key=key, value=value, version=version)
        else:
            if key not in present:
                present.add(key)
                keys.append(key)
            yield worterbuch_line("set", transactionId=number, key=key, value=value)


def _any_value(draw: random.Random) -> object:
    size = _size(draw)
    plain = (draw.randrange(10**9), draw.random(), draw.random() < 0.5, None, _text(draw, size), [_text(draw, size)])
    return draw.choice(plain) if draw.random() < 0.5 else json_value(draw, size)


# -- jebp ------------------------------------------------------------------------------------------------------------


def jebp_plain(message: Message) -> bytes:
    """Return the request that creates a record of a payload alone (command 12), as clients of jebp/1.0 send it."""
    return b"\x12" + _name(message.topic) + struct.pack(">Iq", zlib.crc32(message.payload), 0) + message.payload


def jebp_batch(batch: Sequence[Message], producer: int, sequence: int) -> bytes:
    """Return the request that creates records of one topic with keys and headers (command 13), as our client does."""
    head = b"\x13" + _name(batch[0].topic) + struct.pack(">iqq", -1, producer, sequence)
    return head + b"".join([_record(offset, message) for offset, message in enumerate(batch)])


def _name(topic: str) -> bytes:
    return bytes((1, len(topic))) + topic.encode()


def _record(offset: int, message: Message) -> bytes:
    key = None if message.key is None else message.key.encode()
    parts = [struct.pack(">bqi", 0, EPOCH_MS, -1 if key is None else len(key)), key or b"", _sized(message.payload)]
    parts.append(bytes((len(message.headers),)))
    parts += [_sized(text.encode()) for pair in message.headers.items() for text in pair]
    body = b"".join(parts)
    return struct.pack(">qiI", offset, len(body) + 4, zlib.crc32(body)) + body


def _sized(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def jebp_keyed(batch: Iterable[Message], producer: int) -> list[bytes]:
    """Return a request of command 13 for each message; each topic has a producer id and sequence numbers of its own."""
    sequences: dict[str, int] = {}
    requests = []
    for message in batch:
        sequence = sequences.get(message.topic, 0)
        sequences[message.topic] = sequence + 1
        requests.append(jebp_batch([message], producer + int(message.topic[-2:]), sequence))
    return requests
