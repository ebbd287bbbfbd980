"""Many packets with one system call: recvmmsg and sendmmsg through ctypes (Linux).

Measured on a 2-core machine with 108-byte packets, nanoseconds a packet, one call each for the packets of one turn:

    packets in a turn         1      4     16     64
    recv_into / send       2900   2050   1900   1800
    recvmmsg               4500   1550    890    620
    sendmmsg               4400   1570    940    650
    recv(409600)          20300      (allocates and gives back 400 kB each time)

cffi's calls are a microsecond shorter, which a batch does not notice and a new dependency does. So everything is
received with recvmmsg, one call instead of one for each packet and one that finds nothing; and up to `PLAIN_MAX`
packets are sent one by one.
"""

import ctypes
import errno
import mmap
import os
import socket
from array import array

from babelbus.wire.packets import Packets

BATCH = 64
"""Packets that one turn takes from one client: so many that the call is cheap, so few that the others soon follow."""
PLAIN_MAX = 3
MSG_NOSIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
MSG_DONTWAIT = getattr(socket, "MSG_DONTWAIT", 0)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_size", ctypes.c_uint),
        ("vectors", ctypes.c_void_p),
        ("vector_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_size", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    _fields_ = (("header", _Header), ("size", ctypes.c_uint))


_HEADER_SIZE = ctypes.sizeof(_Message)
_SIZE_AT = _Message.size.offset // ctypes.sizeof(ctypes.c_uint)
_SIZE_STEP = _HEADER_SIZE // ctypes.sizeof(ctypes.c_uint)


class _Messages:
    """An array of headers for one of the two calls, each with one vector."""

    def __init__(self, count: int) -> None:
        self._headers = (_Message * count)()
        self._vectors = (_Vector * count)()
        self.address = ctypes.addressof(self._headers)
        words = memoryview(self._vectors).cast("B").cast("L")  # size_t and pointers are longs on Linux
        self.bases, self.sizes = words[0::2], words[1::2]
        self.got = memoryview(self._headers).cast("B").cast("I")[_SIZE_AT::_SIZE_STEP]
        for number in range(count):
            self._headers[number].header.vectors = ctypes.addressof(self._vectors[number])
            self._headers[number].header.vector_count = 1


class Exchange:
    """The memory and the calls that all packet sockets of one event loop share."""

    def __init__(self, packet_bytes_max: int) -> None:
        # One byte more than a packet may have: so one that is too long can be told from the longest.
        slot_bytes = packet_bytes_max + 1
        stride = -(-slot_bytes // 64) * 64
        self._arena = mmap.mmap(-1, BATCH * stride)  # the kernel gives its pages when they are first used
        self._anchor = ctypes.c_char.from_buffer(self._arena)
        base = ctypes.addressof(self._anchor)
        starts = [number * stride for number in range(BATCH)]
        self.packets = Packets(self._arena, starts, [], fleeting=True)
        """The packets of the last call of `receive`."""
        self._received = _Messages(BATCH)
        self._passed = _Messages(BATCH)  # the same slots, to be sent on
        self._passed_ready = False
        self._other = _Messages(BATCH)
        for number in range(BATCH):
            self._received.bases[number] = self._passed.bases[number] = base + starts[number]
            self._received.sizes[number] = slot_bytes
        library = ctypes.CDLL(None, use_errno=True)
        self._recvmmsg = library.recvmmsg
        self._recvmmsg.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p)
        self._sendmmsg = library.sendmmsg
        self._sendmmsg.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)

    def receive(self, descriptor: int) -> int:
        """Read what is there, at most `BATCH` packets, into `packets`; return how many.

        A packet of size 0 is an empty one or the end. One that is longer than allowed shows one byte too many.

        Raises:
            OSError: `BlockingIOError` when nothing is there, or the connection failed.
        """
        count: int = self._recvmmsg(descriptor, self._received.address, BATCH, MSG_DONTWAIT, None)
        if count < 0:
            _fail()
        self.packets.refill(self._received.got[:count].tolist())
        self._passed_ready = False
        return count

    def send(self, connection: socket.socket, packets: Packets, first: int, last: int) -> tuple[int, int]:
        """Send packets `first` to `last`; return how many the kernel took, and the error number that ended it or 0."""
        if last - first <= PLAIN_MAX:
            return _send_plain(connection, packets, first, last)
        if packets is self.packets:
            if not self._passed_ready:
                count = len(packets.sizes)
                self._passed.sizes[:count] = memoryview(array("L", packets.sizes))
                self._passed_ready = True
            return self._send_many(connection.fileno(), self._passed.address + first * _HEADER_SIZE, last - first)
        sent = 0
        for begin in range(first, last, BATCH):
            count = min(BATCH, last - begin)
            self._point_at(packets, begin, count)
            done, error = self._send_many(connection.fileno(), self._other.address, count)
            sent += done
            if error:
                return sent, error
        return sent, 0

    def _point_at(self, packets: Packets, first: int, count: int) -> None:
        if not packets.address:
            assert isinstance(packets.data, bytes)
            packets.address = ctypes.cast(ctypes.c_char_p(packets.data), ctypes.c_void_p).value or 0
        bases, sizes, base = self._other.bases, self._other.sizes, packets.address
        for number in range(count):
            bases[number] = base + packets.starts[first + number]
            sizes[number] = packets.sizes[first + number]

    def _send_many(self, descriptor: int, address: int, count: int) -> tuple[int, int]:
        sent = 0
        while sent < count:
            done: int = self._sendmmsg(
                descriptor, address + sent * _HEADER_SIZE, count - sent, MSG_DONTWAIT | MSG_NOSIGNAL
            )
            if done < 0:  # an error is told for the first packet of a call only
                return sent, ctypes.get_errno()
            sent += done
        return sent, 0

    def close(self) -> None:
        """Release the memory; nothing may be received or sent any more."""
        del self._anchor


def _send_plain(connection: socket.socket, packets: Packets, first: int, last: int) -> tuple[int, int]:
    data = packets.data
    for number in range(first, last):
        start = packets.starts[number]
        try:
            connection.send(data[start : start + packets.sizes[number]], MSG_DONTWAIT | MSG_NOSIGNAL)
        except OSError as error:
            return number - first, error.errno or errno.EIO
    return last - first, 0


def _fail() -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))  # Python makes BlockingIOError and its like of it
