"""A line to a server that breaks where a test says: in the middle of an answer, as often as it says."""

import contextlib
import selectors
import socket
import socketserver
import threading

CHUNK_BYTES = 2**16
POLL_SECONDS = 0.05


class Relay:
    """Passes bytes on to a server and back, and cuts each of some connections after so many bytes of the server's."""

    def __init__(self, target: str, cuts: list[int]) -> None:
        host, _, port = target.rpartition(":")
        self.connections = 0
        self._cuts = cuts
        relay = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                relay.connections += 1
                left = relay._cuts.pop(0) if relay._cuts else None
                with socket.create_connection((host, int(port))) as server, contextlib.suppress(ConnectionError):
                    pass_on(self.request, server, left)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def address(self) -> str:
        return "{}:{}".format(*self._server.server_address)

    def __enter__(self) -> "Relay":
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_SECONDS,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def pass_on(client: socket.socket, server: socket.socket, left: int | None) -> None:
    """Pass bytes on until one side ends, or `left` bytes of the server's have been passed."""
    with selectors.DefaultSelector() as ready:
        ready.register(client, selectors.EVENT_READ)
        ready.register(server, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                source = key.fileobj
                assert isinstance(source, socket.socket)
                data = source.recv(CHUNK_BYTES)
                if not data:
                    return
                if source is client:
                    server.sendall(data)
                    continue
                if left is not None:
                    data = data[:left]
                    left -= len(data)
                client.sendall(data)
                if left == 0:
                    return
