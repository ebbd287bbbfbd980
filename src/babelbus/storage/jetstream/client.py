"""The connection to NATS: an event loop in a thread of its own, so that neither the server's loop nor a slow NATS waits
for the other. Calls that end in `_soon` and `call` come from any thread, all others from the thread of the connection.
"""

import asyncio
import logging
import re
import ssl
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

import msgspec
import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from babelbus.config import JetstreamSettings
from babelbus.errors import ConfigError
from babelbus.storage.jetstream.errors import NatsAwayError, NatsRefusedError, NoLeaderError

log = logging.getLogger(__name__)

OLDEST = (2, 12)
"""Earlier versions of NATS may accept several messages that expect one sequence (nats-server 4320)."""
ATTEMPT_SECONDS = 1.0
"""How long the client waits before it tries the next server."""
REPLY_SECONDS = 2.0
"""How long a reply may take; then the request is made again, because its leader may be gone."""
READ_AGAIN_SECONDS = (0.25, 0.25, *(0.5, 0.5, 2.0) * 5)
"""How long each attempt of a read waits for its first answer. Many are short: behind an election every
second request may still go to the server that hangs. All of them outlast the election."""
PURGE_SECONDS = 60.0
"""How long NATS may take to delete messages, or to make a stream."""
SAY_ATTEMPTS = 10
"""How many attempts of a start pass until it says again that it waits for NATS."""
CANCEL_AGAIN_SECONDS = 0.1
READ_BYTES_PENDING_MAX = 512 * 2**20
USER_INFORMATION = re.compile(r"^([A-Za-z]+://)?.*@")
"""User and password in front of the host of an address."""

T = TypeVar("T")


class Stored(msgspec.Struct, frozen=True):
    """A message as a stream holds it."""

    subject: str
    sequence: int
    data: bytes


class ApiError(Exception):
    """JetStream's own refusal of a call."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(f"{description} ({code})")
        self.code, self.description = code, description


class _Client(Client):
    """The client of the library, which forgets a connection that fails before it is used, and opens the next one."""

    async def _connect_to_server(self, s: Any) -> None:
        """Close the connection before, and connect."""
        if self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)


class Nats:
    """The connection, which connects again as long as the server runs."""

    def __init__(self, settings: JetstreamSettings, password: str | None) -> None:
        self._settings = settings
        self._name = ""
        self._password = password
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._client: Client | None = None
        self._closed = False
        self.on_lost: list[Callable[[], None]] = []
        """Called when the connection is lost: the outcome of what is under way is unknown."""
        self.on_ack: Callable[[list[str], Msg], None] = lambda parts, message: None
        """Called with the last parts of the reply's subject, and the acknowledgement."""
        self._heard: list[tuple[str, Callable[[Msg], None]]] = []
        """The subjects that are listened to, also after the next connection."""
        self._inbox = ""
        self._said = ""
        self._attempts = 0
        self.refused: NatsRefusedError | None = None
        """Why NATS takes this server no more; it tries again all the same."""

    # -- from any thread ---------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Connect, and wait until NATS is there; the `name` is what NATS calls the connection.

        Raises:
            NatsRefusedError: NATS is there and cannot be used.
        """
        self._name = name
        self._thread = threading.Thread(target=self._run, name="jetstream", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._connect(), self.loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def call(self, work: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        """Return what `work` gives in the thread of the connection.

        Raises:
            NatsAwayError: NATS did not answer in time, or the connection is closed.
        """
        if self._closed:
            work.close()
            raise NatsAwayError("the connection to NATS is closed")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_seconds)
        except (FutureTimeoutError, CancelledError):
            future.cancel()
            raise NatsAwayError("NATS does not answer; try again") from None

    def stop(self) -> None:
        """End the connection and its thread."""
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            self.loop.close()
            return
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks(self.loop) - {asyncio.current_task()}
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        while tasks:  # `wait_for` of Python 3.11, which the client calls, may lose a cancellation
            for task in tasks:
                task.cancel()
            done, tasks = await asyncio.wait(tasks, timeout=CANCEL_AGAIN_SECONDS)
            await asyncio.gather(*done, return_exceptions=True)
        if client is not None and client._transport is not None:
            client._transport.close()  # type: ignore[no-untyped-call]  # it may be a new one, made while the client was closed

    # -- connecting --------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        """Connect; wait for a NATS server that is away."""
        options = self._options()
        while True:
            errors: list[BaseException] = []
            try:
                client = await self._try(options, errors)
            except NatsRefusedError:
                raise
            except Exception as error:  # of sockets, of TLS, of the client: NATS is away
                await self.wait_again(errors[-1] if errors else error)
                continue
            self._client = client
            self._inbox = client.new_inbox()
            acks = await client.subscribe(f"{self._inbox}.*.*.*", cb=self._receive_ack)
            acks._pending_bytes_limit = 0
            for subject, callback in self._heard:
                await _subscribe(client, subject, callback)
            return

    async def wait_again(self, error: BaseException) -> None:
        """Wait until it is time for the next attempt of a start; say now and then what the start waits for."""
        if self._attempts % SAY_ATTEMPTS == 0:
            log.warning("waiting for NATS at %s (jetstream.servers): %s", ", ".join(self.servers), error)
        self._attempts += 1
        await asyncio.sleep(ATTEMPT_SECONDS)

    def _options(self) -> dict[str, Any]:
        settings = self._settings
        options: dict[str, Any] = {
            "servers": _split(settings.servers),
            "name": f"babelbus {self._name}",
            "connect_timeout": 2,
            "pending_size": 0,  # what is published while the connection is lost would be sent much later
            "ping_interval": 2,
            "max_outstanding_pings": 2,
        }
        if settings.credentials_file is not None:
            options["user_credentials"] = settings.credentials_file
        if settings.user is not None:
            options["user"] = settings.user
        if self._password is not None:
            options["password"] = self._password
        if settings.ca_file is not None:
            try:
                options["tls"] = ssl.create_default_context(cafile=settings.ca_file)
            except OSError as error:
                raise ConfigError(f"jetstream.ca_file: {settings.ca_file}: {error}") from error
        return options

    async def _try(self, options: dict[str, Any], errors: list[BaseException]) -> Client:
        """Return a connected client.

        Raises:
            NatsRefusedError: it is there and cannot be used.
        """

        async def note(error: Exception) -> None:
            errors.append(error)

        probe = _Client()
        try:  # a client that may connect again does not say why it cannot the first time
            await probe.connect(
                **options, allow_reconnect=False, max_reconnect_attempts=1, reconnect_time_wait=0, error_cb=note
            )
        except nats.errors.Error as error:
            texts = " ".join(str(one) for one in (*errors, error)).lower()
            if "authorization" in texts or "authentication" in texts or "expired" in texts:
                raise NatsRefusedError(
                    "NATS refuses the credentials of jetstream.credentials_file, jetstream.user or the address:"
                    f" {error}; correct them and start again"
                ) from error
            raise
        else:
            version = probe.connected_server_version
        finally:
            await probe.close()
        if (version.major, version.minor) < OLDEST:
            raise NatsRefusedError(
                f"NATS {version.major}.{version.minor}.{version.patch} is too old: engine jetstream needs"
                f" {OLDEST[0]}.{OLDEST[1]} or newer, because earlier ones may accept two writers"
            )
        client = _Client()
        try:
            await client.connect(
                **options,
                max_reconnect_attempts=-1,
                reconnect_time_wait=ATTEMPT_SECONDS,  # type: ignore[arg-type]  # seconds of asyncio.sleep
                error_cb=self._note_error,
                disconnected_cb=self._lost,
                reconnected_cb=self._back,
                closed_cb=self._ended,
            )
        except BaseException:
            await client.close()
            raise
        return client

    async def _note_error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        if text != self._said:
            self._said = text
            log.warning("NATS: %s", text)

    async def _lost(self) -> None:
        if not self._closed:
            log.warning("the connection to NATS is lost; connecting again")
        for tell in self.on_lost:
            tell()

    async def _back(self) -> None:
        self._said = ""
        log.warning("connected to NATS again")

    async def _ended(self) -> None:
        """Connect anew when the client gave up: credentials that NATS refuses suddenly."""
        if self._closed or self._client is None:
            return
        self._client = None
        for tell in self.on_lost:
            tell()
        while not self._closed:
            try:
                await self._connect()
            except NatsRefusedError as error:
                if str(error) != str(self.refused):
                    log.error("%s", error)
                self.refused = error
                await asyncio.sleep(ATTEMPT_SECONDS)
            else:
                self.refused = None
                return

    # -- in the thread of the connection -----------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """The connected client.

        Raises:
            NatsAwayError: it is not connected now.
        """
        if self._client is None or not self._client.is_connected:
            raise self.refused or NatsAwayError(f"no NATS server at {', '.join(self.servers)} answers; try again")
        return self._client

    @property
    def servers(self) -> list[str]:
        """The addresses of `jetstream.servers` without user and password, which nobody may read anywhere."""
        return [USER_INFORMATION.sub(r"\1", server) for server in _split(self._settings.servers)]

    @property
    def address(self) -> str:
        """The address of the NATS server that the connection goes to; empty without a connection."""
        client = self._client
        url = None if client is None or not client.is_connected else client.connected_url
        return "" if url is None else url.netloc.rpartition("@")[2]

    @property
    def payload_bytes_max(self) -> int:
        """The largest message that NATS takes."""
        return 2**20 if self._client is None else int(self._client.max_payload)

    async def hear(self, subject: str, callback: Callable[[Msg], None]) -> None:
        """Call back with each message on a subject from now on, as long as the server runs.

        Raises:
            NatsAwayError: NATS does not answer.
        """
        await _subscribe(self.client, subject, callback)
        self._heard.append((subject, callback))

    async def publish(self, subject: str, data: bytes, sequence_before: int, token: str) -> None:
        """Send a message that must get the sequence behind `sequence_before`; `on_ack` is told the outcome."""
        headers = {"Nats-Expected-Last-Sequence": str(sequence_before)}
        await self.client.publish(subject, data, f"{self._inbox}.{token}", headers)

    async def _receive_ack(self, message: Msg) -> None:
        self.on_ack(message.subject.rsplit(".", 3)[1:], message)

    async def ask(
        self, subject: str, content: bytes, headers: dict[str, str] | None = None, seconds: float = REPLY_SECONDS
    ) -> Msg:
        """Return the reply to a request.

        Raises:
            NoLeaderError: no reply came.
            NatsAwayError: there is no connection.
        """
        try:
            return await self.client.request(subject, content, timeout=seconds, headers=headers)
        except nats.errors.NoRespondersError as error:
            raise NoLeaderError("no JetStream answers: it is not enabled for this account, or has no leader") from error
        except nats.errors.TimeoutError as error:
            raise NoLeaderError("NATS does not answer; try again") from error
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise NatsAwayError(f"NATS does not answer ({str(error) or type(error).__name__}); try again") from error

    async def api(
        self, call: str, content: dict[str, Any] | None = None, seconds: float = REPLY_SECONDS
    ) -> dict[str, Any]:
        """Return the reply of JetStream to a call.

        Raises:
            ApiError: JetStream refused.
            NoLeaderError: no reply came, or there is no leader that could give one.
            NatsAwayError: there is no connection.
        """
        body = b"" if content is None else msgspec.json.encode(content)
        reply = await self.ask(f"$JS.API.{call}", body, seconds=seconds)
        answer: dict[str, Any] = msgspec.json.decode(reply.data)
        if "error" in answer:
            refusal = ApiError(answer["error"].get("err_code", 0), answer["error"].get("description", "refused"))
            if refusal.code in NO_LEADER:
                raise NoLeaderError(f"JetStream has no leader for {call}: {refusal}; try again") from refusal
            raise refusal
        return answer

    async def get_from_leader(self, stream: str, **chosen: str | int) -> Stored | None:
        """Return one message from the leader of a stream: by `seq`, `next_by_subj` or `last_by_subj`.

        Raises: as `api`.
        """
        try:
            message = (await self.api(f"STREAM.MSG.GET.{stream}", chosen))["message"]
        except ApiError as error:
            if error.code == NO_MESSAGE:
                return None
            raise
        data = message.get("data", "")
        return Stored(message["subject"], message["seq"], msgspec.json.decode(f'"{data}"', type=bytes))

    async def read_from_leader(self, stream: str, **chosen: str | int) -> Stored | None:
        """Return one message from the leader of a stream; ask again while none answers, until an election is over.

        Raises:
            NatsAwayError: JetStream refused, or no reply came.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + sum(READ_AGAIN_SECONDS)
        while True:
            try:
                return await self.get_from_leader(stream, **chosen)
            except ApiError as error:
                raise NatsAwayError(f"stream {stream}: {error}") from error
            except NoLeaderError:
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(READ_AGAIN_SECONDS[0])

    async def get_batch(self, stream: str, subject: str, sequence: int, bytes_max: int, count: int) -> list[Stored]:
        """Return messages of a subject from a sequence on, from any replica, which may lag.

        NATS gives each request to one replica, and goes on to give some to a server that hangs until it has missed its
        pings for minutes. So a request without an answer is made again, soon at first.

        Raises:
            NatsAwayError: no reply came.
        """
        for seconds in READ_AGAIN_SECONDS:
            try:
                return await self._get_batch(stream, subject, sequence, bytes_max, count, seconds)
            except NoLeaderError:
                await asyncio.sleep(seconds)
            except _NoReplyError:
                pass
        raise NatsAwayError("NATS does not answer a read; try again")

    async def _get_batch(
        self, stream: str, subject: str, sequence: int, bytes_max: int, count: int, seconds: float
    ) -> list[Stored]:
        client = self.client
        inbox = client.new_inbox()
        replies = await client.subscribe(inbox, pending_bytes_limit=READ_BYTES_PENDING_MAX)
        asked = {"seq": sequence, "batch": count, "max_bytes": bytes_max, "next_by_subj": subject}
        found: list[Stored] = []
        try:
            await client.publish(f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(asked), inbox)
            while True:
                message = await replies.next_msg(timeout=REPLY_SECONDS if found else seconds)
                headers = message.headers or {}
                if "Status" in headers:
                    if headers["Status"] in ("204", "404"):
                        return found
                    text = f"stream {stream} cannot be read: {headers['Status']} {headers.get('Description', '')}"
                    raise NoLeaderError(text) if headers["Status"] == UNAVAILABLE else NatsAwayError(text)
                found.append(Stored(headers["Nats-Subject"], int(headers["Nats-Sequence"]), message.data))
                if count == 1:
                    return found
        except nats.errors.TimeoutError as error:
            if not found:
                raise _NoReplyError from error
            raise NatsAwayError("NATS does not answer to the end of a read; try again") from error
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise NatsAwayError(f"NATS does not answer ({str(error) or type(error).__name__}); try again") from error
        finally:
            if not client.is_closed:
                await replies.unsubscribe()


class _NoReplyError(Exception):
    """No replica has answered a read so far."""


def _split(servers: str | None) -> list[str]:
    return [server.strip() for server in (servers or "").split(",")]


async def _subscribe(client: Client, subject: str, callback: Callable[[Msg], None]) -> None:
    async def receive(message: Msg) -> None:
        callback(message)

    await client.subscribe(subject, cb=receive)


UNAVAILABLE = "503"
"""The status of a read that no replica is there to answer."""
NO_LEADER = (10008, 10009)
"""JetStream is unavailable, or the server that answers leads no more: for as long as an election takes."""
NO_MESSAGE = 10037
NO_STREAM = 10059
WRONG_SEQUENCE = (10071, 10164)
"""Another message came in between; the second code is for constants that a cluster could not check."""
