"""The administration API over HTTP: the endpoint of a server on this machine, or one that `--admin` names."""

import base64
import http.client
from collections.abc import Generator
from typing import TYPE_CHECKING

from babelbus.cli.api import CutAnswerError, no_answer
from babelbus.cli.command import CommandError

READ_BYTES = 2**16

if TYPE_CHECKING:
    import ssl


class HttpTransport:
    """The endpoint of one server; requests go over TLS if there is a context.

    `proof` is the header that says who asks, `None` where the certificate of the client does; `is_of_folder` whether
    that is the token of the data folder.
    """

    def __init__(
        self, address: str, proof: str | None, context: "ssl.SSLContext | None" = None, *, is_of_folder: bool = True
    ) -> None:
        self.address = address
        self._is_of_folder = is_of_folder
        self._context = context
        self._proof = proof

    def ask(self, method: str, path: str, content: bytes | None, timeout_seconds: float) -> tuple[int, bytes]:
        """Send a request; return the status and the body of its answer."""
        connection, response = self._request(method, path, content, timeout_seconds)
        try:
            return response.status, self._receive(response, timeout_seconds, method)
        finally:
            connection.close()

    def begin(self, path: str, timeout_seconds: float) -> tuple[int, Generator[bytes, None, None]]:
        """Begin a request whose answer is lines; return the status and the parts of the answer as they arrive."""
        connection, response = self._request("GET", path, None, timeout_seconds)

        def read() -> Generator[bytes, None, None]:
            try:
                yield b""  # started at once, so that closing it closes the connection
                while chunk := self._receive(response, timeout_seconds, size=READ_BYTES):
                    yield chunk
            finally:
                connection.close()

        chunks = read()
        next(chunks)
        return response.status, chunks

    def advice(self, status: int, code: str) -> str | None:
        """Return the text that replaces the error of an answer, `None` to keep the text."""
        if status == 401 and self._is_of_folder:
            return (
                f"the server on {self.address} does not take the token of this data folder: "
                "it runs on another one; name that with --data-folder"
            )
        return None

    def _request(
        self, method: str, path: str, content: bytes | None, timeout_seconds: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Return the connection and the beginning of an answer; the caller closes both."""
        host, _, port = self.address.rpartition(":")
        host = host.strip("[]")
        if self._context is None:
            connection = http.client.HTTPConnection(host, int(port), timeout=timeout_seconds)
        else:
            connection = http.client.HTTPSConnection(host, int(port), timeout=timeout_seconds, context=self._context)
        headers = {"Content-Type": "application/json"}
        if self._proof is not None:
            headers["Authorization"] = self._proof
        try:
            try:
                connection.request(method, path, content, headers)
            except (BrokenPipeError, ConnectionResetError):
                if connection.sock is None:  # not even connected
                    raise
                # Refused before the request was sent completely; the answer has the reason.
            response = connection.getresponse()
        except ConnectionRefusedError:
            connection.close()
            raise CommandError(f"nothing listens on {self.address}; start one with 'babelbus serve'") from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._silent(error, timeout_seconds, method) from error
        except BaseException:
            connection.close()
            raise
        return connection, response

    def _receive(
        self, response: http.client.HTTPResponse, timeout_seconds: float, method: str = "GET", size: int | None = None
    ) -> bytes:
        """Return the whole answer, or the bytes received so far, at most `size`; no bytes mean the end."""
        try:
            return response.read() if size is None else response.read1(size)
        except (OSError, http.client.HTTPException) as error:
            if size is not None and not isinstance(error, TimeoutError):
                raise CutAnswerError(self.address, str(error) or type(error).__name__) from error
            raise self._silent(error, timeout_seconds, method) from error

    def _silent(self, error: Exception, timeout_seconds: float, method: str) -> CommandError:
        if isinstance(error, TimeoutError):
            return no_answer(self.address, f"nothing came for {timeout_seconds:g} s", method)
        reason: str = getattr(error, "verify_message", "")
        if reason:
            return CommandError(
                f"the certificate of {self.address} is not trusted: {reason}; name its CA with --ca FILE"
            )
        if self._context is None and isinstance(error, http.client.RemoteDisconnected):
            advice = f"if it speaks TLS, write --admin https://{self.address}"
            return CommandError(f"{self.address} closed the connection without an answer; {advice}")
        if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
            # Its text is what came, which may be any bytes.
            return CommandError(
                f"{self.address} does not speak HTTP: this may be the port of another protocol; "
                "'babelbus serve' prints that of admin"
            )
        return CommandError(f"{self.address} does not answer: {str(error) or type(error).__name__}")


def bearer(token: str) -> str:
    """Return the header that proves a token."""
    return f"Bearer {token}"


def basic(user: str, password: str) -> str:
    """Return the header that proves a user by a password."""
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode('utf-8', 'surrogateescape')).decode()}"
