"""A way to a listener that a test can watch, narrow or break."""

import socket
import threading
from contextlib import suppress
from typing import Self

from tests.support.bus import SAFETY_NET_SECONDS


class Passage:
    """A listener of its own, whose connections go on to another one; `close`, or the end of `with`, breaks them."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"
        self._ends: list[socket.socket] = []
        self._connections: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = self.connect()
                except OSError:
                    client.close()
                    continue
                for end in (client, server):  # else the system holds small pieces back, for 40 ms and more
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._ends += (client, server)
                thread = threading.Thread(target=self._carry, args=(client, server), daemon=True)
                self._connections.append(thread)
                thread.start()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        back = threading.Thread(target=self._pump, args=(server, client, True), daemon=True)
        back.start()
        self._pump(client, server, False)
        back.join()
        client.close()
        server.close()

    def _pump(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := self.receive(source, is_answer):
                self.send(target, data, is_answer)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def connect(self) -> socket.socket:
        """Connect to the listener at the other end."""
        return socket.create_connection(self.target)

    def receive(self, source: socket.socket, is_answer: bool) -> bytes:
        """Return the next bytes of one side."""
        return source.recv(65536)

    def send(self, target: socket.socket, data: bytes, is_answer: bool) -> None:
        """Send bytes to the other side."""
        target.sendall(data)

    def wait(self) -> None:
        """Wait until all connections have ended by themselves."""
        for thread in self._connections:
            thread.join(SAFETY_NET_SECONDS)

    def cut(self) -> None:
        """Break all connections."""
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Break all connections, and take no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(SAFETY_NET_SECONDS)
        self._listener.close()
        self.cut()
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
