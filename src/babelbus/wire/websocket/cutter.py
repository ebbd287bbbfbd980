"""Where the frames of a WebSocket peer begin and end in a chunk, and whether they may (RFC 6455, section 5)."""

from babelbus.wire.websocket.frames import (
    BINARY,
    CLOSE,
    COMPRESSED,
    CONTINUATION,
    CONTROL_BYTES_MAX,
    FIN,
    MASKED,
    MESSAGE_TOO_BIG,
    PING,
    PONG,
    PROTOCOL_ERROR,
    RESERVED,
    TEXT,
    WebSocketError,
)

_WHOLE_TEXT = FIN | TEXT
_WHOLE_BINARY = FIN | BINARY
_CONTROLS = (CLOSE, PING, PONG)
_RUN_MIN = 8
_RUN_MAX = 512  # frames that are looked at together for a run of equal size


class Cutter:
    """Finds frames, and refuses those whose head is wrong before their payload has come.

    Attributes:
        needed: how many bytes the first incomplete frame needs at least to be looked at again.
    """

    def __init__(self, *, is_server: bool, message_bytes_max: int, compressed: bool) -> None:
        self.needed = 2
        self._mask_bit = MASKED if is_server else 0
        self._head_bytes = 6 if is_server else 2
        self._message_bytes_max = message_bytes_max
        self._compressed = compressed
        self._open = 0  # first byte of the fragmented message that has not ended; 0 without such a message
        self._open_bytes = 0

    def cut(self, data: bytes, firsts: list[int], starts: list[int], ends: list[int]) -> int:
        """Record the complete frames of `data`, and return where the first incomplete frame begins."""
        position, size = 0, len(data)
        mask_bit, head_bytes, bytes_max = self._mask_bit, self._head_bytes, self._message_bytes_max
        short_max = min(125, bytes_max)
        whole = not self._open  # a frame may begin a message
        last_step, run_max = 0, _RUN_MIN
        self.needed = 2
        while position + 2 <= size:
            first = data[position]
            length = data[position + 1] - mask_bit
            start = 0
            if _WHOLE_TEXT <= first <= _WHOLE_BINARY and whole:
                if 0 <= length <= short_max:
                    start = position + head_bytes
                elif length == 126 and position + 4 <= size:
                    length = data[position + 2] << 8 | data[position + 3]
                    if 126 <= length <= bytes_max:
                        start = position + head_bytes + 2
            if start:
                step = start + length - position
                if step == last_step and position + step <= size:
                    run = _run(data, position, step, start - position - head_bytes + 2, run_max)
                    # Behind a short run only a few frames are searched for the next; behind a long run, ever more.
                    run_max = min(run_max * 4, _RUN_MAX) if run == run_max else _RUN_MIN
                    after = position + run * step
                    firsts += [first] * run
                    starts += range(start, start + run * step, step)
                    ends += range(position + step, after + step, step)
                    position = after
                    continue
                last_step = step
            else:
                head = self._read_head(data[position : position + 10])
                if head is None:
                    break
                start, length = position + head[0], head[1]
            end = start + length
            if end > size:
                self.needed = end - position
                break
            firsts.append(first)
            starts.append(start)
            ends.append(end)
            position = end
            if first < _WHOLE_TEXT or first > _WHOLE_BINARY:
                if first == FIN | CLOSE:
                    return size  # after a close frame there is nothing (section 5.5.1): the rest is ignored
                self._note(first, length)
                whole = not self._open
        return position

    def _read_head(self, head: bytes) -> tuple[int, int] | None:
        """Return the size of a frame's head and of its payload; None if the head is incomplete."""
        first, length = head[0], head[1] - self._mask_bit
        self._check(first, length)
        length_bytes = 0 if length < 126 else 2 if length == 126 else 8
        if len(head) < 2 + length_bytes:
            self.needed = 2 + length_bytes
            return None
        if length_bytes:
            length = _read_length(head[2 : 2 + length_bytes])
        total = self._open_bytes + length
        if total > self._message_bytes_max and not first & CLOSE:
            # Refused before it arrives: a peer must not make us hold what it only announces.
            raise WebSocketError(
                MESSAGE_TOO_BIG, f"a message of {total} bytes or more, limit {self._message_bytes_max}"
            )
        return self._head_bytes + length_bytes, length

    def _check(self, first: int, length: int) -> None:
        opcode = first & 15
        if not 0 <= length < 128:
            raise WebSocketError(PROTOCOL_ERROR, "a frame is masked by a server, or not masked by a client")
        if opcode > BINARY and opcode not in _CONTROLS:
            raise WebSocketError(PROTOCOL_ERROR, f"a frame of unknown kind {opcode}")
        compressed = first & RESERVED == COMPRESSED and self._compressed and opcode in (TEXT, BINARY)
        if first & RESERVED and not compressed:
            raise WebSocketError(PROTOCOL_ERROR, f"a frame with reserved bits: first byte 0x{first:02x}")
        if opcode >= CLOSE:
            if not first & FIN:
                raise WebSocketError(PROTOCOL_ERROR, "a control frame is fragmented")
            if length > CONTROL_BYTES_MAX:
                raise WebSocketError(PROTOCOL_ERROR, f"a control frame of more than {CONTROL_BYTES_MAX} bytes")
        elif opcode == CONTINUATION and not self._open:
            raise WebSocketError(PROTOCOL_ERROR, "a continuation without a message")
        elif opcode != CONTINUATION and self._open:
            raise WebSocketError(PROTOCOL_ERROR, "a message begins before the previous one has ended")

    def _note(self, first: int, length: int) -> None:
        """Record that this frame, which is no close frame, is complete."""
        if first & CLOSE:
            return
        if first & FIN:
            self._open = self._open_bytes = 0
        else:
            self._open = self._open or first
            self._open_bytes += length


def _run(data: bytes, position: int, step: int, head_bytes: int, run_max: int) -> int:
    """Return how many frames from `position` on have the same head but for the key: a check of one is valid for all."""
    run = min((len(data) - position) // step, run_max)
    for start in range(position, position + head_bytes):
        column = data[start : start + run * step : step]
        run -= len(column.lstrip(column[:1]))
    return run


def _read_length(field: bytes) -> int:
    length = int.from_bytes(field, "big")
    if length >> 63:
        raise WebSocketError(PROTOCOL_ERROR, "a frame length with its highest bit set")
    # Section 5.2: the shortest form MUST be used. Every sender does; one that does not is broken, or tries
    # to make two readers disagree.
    if length < (126 if len(field) == 2 else 2**16):
        raise WebSocketError(PROTOCOL_ERROR, f"a frame length of {length} in {len(field)} bytes")
    return length
