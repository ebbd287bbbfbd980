"""The administration API over jebp: for a server elsewhere, with the identity of the user."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from babelbus.cli.api import CutAnswerError, UnsupportedError, no_answer
from babelbus.cli.command import CommandError
from babelbus.client import (
    BlockingAdmin,
    ConnectionLostError,
    RequestError,
    RequestTimeoutError,
    UnsupportedByServerError,
    admin_of,
)
from babelbus.errors import BabelbusError

if TYPE_CHECKING:
    from babelbus.client import BlockingClient


class JebpTransport:
    """The API of the server of a connected client."""

    def __init__(self, address: str, client: "BlockingClient") -> None:
        self.address = address
        self._admin: BlockingAdmin = admin_of(client)

    def ask(self, method: str, path: str, content: bytes | None, timeout_seconds: float) -> tuple[int, bytes]:
        """Send a request; return the status and the body of its answer."""
        with self._as_commands_fail(method):
            return self._admin.ask(method, path, content or b"", timeout_seconds)

    def begin(self, path: str, timeout_seconds: float) -> tuple[int, Generator[bytes, None, None]]:
        """Begin a request whose answer is lines; return the status and the parts of the answer as they arrive."""
        parts = self._admin.parts("GET", path, b"", timeout_seconds)
        with self._as_commands_fail():
            status, first = next(parts)

        def read() -> Generator[bytes, None, None]:
            try:
                yield first
                for _, part in parts:
                    yield part
            except RequestTimeoutError as error:
                raise no_answer(self.address, f"nothing came for {timeout_seconds:g} s") from error
            except (ConnectionLostError, RequestError) as error:
                raise CutAnswerError(self.address, error) from error
            finally:
                parts.close()

        return status, read()

    @contextmanager
    def _as_commands_fail(self, method: str = "GET") -> Iterator[None]:
        """Replace the errors of the client by those of commands."""
        try:
            yield
        except UnsupportedByServerError as error:
            raise UnsupportedError(str(error)) from error
        except RequestTimeoutError as error:
            raise no_answer(self.address, str(error), method) from error
        except BabelbusError as error:
            raise CommandError(str(error)) from error

    def advice(self, status: int, code: str) -> str | None:
        """Return `None`: every error of the server is shown."""
        return None
