"""The server of a command, and the identity to use: from options, environment, a context, and the data folder here.

A running server writes its addresses to `<data>/conf/addresses`, so that a command that knows the data folder finds
it on any port. The note counts only while the folder's lock is held: a killed server leaves the note behind.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click
import msgspec

from babelbus.cli.command import CommandError
from babelbus.cli.contexts import CONTEXT_VARIABLE, LOCAL, Context, Contexts, own_key_path
from babelbus.cli.contexts import load as load_contexts

if TYPE_CHECKING:
    import ssl

    from babelbus.cli.api import AdminApi
    from babelbus.cli.api_http import HttpTransport
    from babelbus.cli.api_jebp import JebpTransport
    from babelbus.client import BlockingClient
    from babelbus.config import Config

HTTPS = "https://"
ADMIN_VARIABLE = "BABELBUS_ADMIN"
SERVER_VARIABLE = "BABELBUS_SERVER"
IDENTITY_VARIABLE = "BABELBUS_IDENTITY"
FINGERPRINT_VARIABLE = "BABELBUS_SERVER_FINGERPRINT"
RECORD_VARIABLES = frozenset(
    f"BABELBUS_{name}"
    for name in (
        *("TOPIC", "PARTITION", "OFFSET", "TIMESTAMP", "ATTEMPT", "SUBJECT", "GROUP"),
        *("KEY", "KEY_BASE64", "HEADERS", "HEADERS_BASE64", "REMOVED"),
    )
)
"""Variables of the command of `consume --exec`."""
CA_VARIABLE = "BABELBUS_CA"
CLIENT_CERT_VARIABLE = "BABELBUS_CLIENT_CERT"
USER_VARIABLE = "BABELBUS_USER"
TOKEN_FILE_VARIABLE = "BABELBUS_TOKEN_FILE"  # noqa: S105  # the name of a variable
DATA_FOLDER_VARIABLE = "BABELBUS_DATA_FOLDER"
OWN_VARIABLES = RECORD_VARIABLES | {
    CONTEXT_VARIABLE,
    *(ADMIN_VARIABLE, SERVER_VARIABLE, IDENTITY_VARIABLE, FINGERPRINT_VARIABLE, CA_VARIABLE, CLIENT_CERT_VARIABLE),
    *(USER_VARIABLE, TOKEN_FILE_VARIABLE),
}
"""Variables that the command line reads or sets beside the settings, so that they are no misspelt settings."""

_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where a listener is everywhere, we reach it here
FIRST_START = "start a server there once with 'babelbus serve', or name another folder with --data-folder"


class Running(msgspec.Struct, frozen=True):
    """The note of a running server: its process and its addresses ("host:port" by protocol)."""

    pid: int
    addresses: dict[str, str]
    admin_tls: bool = False
    """Whether the administration endpoint speaks TLS."""


class Target(msgspec.Struct, kw_only=True, dict=True):
    """The server of a command, as the options of the same names say; each part is looked up when it is needed."""

    config_path: str | None = None
    data_folder: str | None = None
    context: str | None = None
    admin: str | None = None
    server: str | None = None
    identity: str | None = None
    server_fingerprint: str | None = None
    ca: str | None = None
    client_cert: str | None = None
    user: str | None = None
    token_file: str | None = None
    warned: bool = False
    timeout_seconds: float = 30.0
    """How long a request may go without an answer."""

    @cached_property
    def chosen(self) -> tuple[str, Context] | None:
        """The context that counts, with its name; `None` if options or the environment name a server or a folder.

        Raises:
            CommandError: the file of contexts is wrong, or has no such context.
        """
        if self.admin or self.server:
            return None
        name, contexts = self.context, Contexts()
        if name is None and not (self.data_folder or self.config_path or os.environ.get(DATA_FOLDER_VARIABLE)):
            contexts = load_contexts()
            name = contexts.current
        elif name not in (None, LOCAL):
            contexts = load_contexts()
        return None if name in (None, LOCAL) else (str(name), contexts.get(str(name)))

    @property
    def remote(self) -> str | None:
        """The address of the server elsewhere; `None` for the server on the data folder, or at `--admin`."""
        return self.server or (self.chosen[1].server if self.chosen else None)

    def origin(self, command: click.Context, name: str) -> str:
        """Return where the value of an option is from, for a person."""
        source = command.get_parameter_source(name)
        if source is click.core.ParameterSource.COMMANDLINE or command.find_root().params.get(name):
            return "option"
        return "environment" if source is click.core.ParameterSource.ENVIRONMENT else "in use"

    def check_local(self, command: str) -> None:
        """Check that a command which works on a data folder was not meant for a server elsewhere.

        Raises:
            CommandError: a context is in use.
        """
        if self.chosen is not None:
            name, context = self.chosen
            raise CommandError(
                f"context {name} is a server elsewhere ({context.server}), and '{command}' works on a data folder: run "
                f"it on that machine, or name a folder here with --data-folder"
            )

    @cached_property
    def config(self) -> "Config":
        """The configuration that a server started from here would have.

        Raises:
            ConfigError: the configuration is wrong.
        """
        return load_config(self.config_path, {"data.folder": self.data_folder})

    @property
    def folder(self) -> str:
        """The data folder, absolute."""
        return os.path.abspath(self.config.data.folder)

    def existing_folder(self) -> str:
        """Return the data folder.

        Raises:
            CommandError: the folder does not exist; a misspelt folder must not be created by mistake.
        """
        if not os.path.isdir(self.folder):
            raise CommandError(f"there is no data folder {self.folder}; {FIRST_START}")
        return self.folder

    def conf(self, name: str) -> str:
        """Return the path of a file in `<data>/conf`."""
        return os.path.join(self.folder, "conf", name)

    def running(self) -> Running | None:
        """Return the note of the server that runs on the data folder; `None` without a server or a note."""
        pid = lock_owner(self.folder)
        if pid is None:
            return None
        try:
            with open(self.conf("addresses"), "rb") as file:
                note = msgspec.json.decode(file.read(), type=Running)
        except (OSError, msgspec.DecodeError):
            return None
        return note if note.pid == pid else None  # a note of another process is of a killed server

    def api(self) -> "AdminApi":
        """Return the administration API of the server.

        Raises:
            BabelbusError: the token cannot be read, or the configuration is wrong.
        """
        from babelbus.cli.api import AdminApi

        return AdminApi(self._http() if self._speaks_http() else self._jebp())

    def _speaks_http(self) -> bool:
        """Return whether the administration endpoint is asked, and not the jebp listener."""
        if self.admin:
            return True
        if self.user is not None or self.token_file is not None:
            if self.remote:
                raise click.UsageError("--user and --token-file prove who asks over HTTP: name its address by --admin")
            return True
        running = None if self.remote else self.running()
        has_jebp_alone = running is not None and "admin" not in running.addresses and "jebp" in running.addresses
        return not self.remote and not has_jebp_alone

    def _jebp(self) -> "JebpTransport":
        """Return the transport over the connection of this command."""
        from babelbus.cli.api_jebp import JebpTransport

        return JebpTransport(self.jebp_address(), self.client)

    def _http(self) -> "HttpTransport":
        """Return the transport to the administration endpoint."""
        from babelbus.cli.api_http import HttpTransport, basic, bearer
        from babelbus.identities.key_files import read_key_file
        from babelbus.web.token import check_token, read_token

        if self.user is not None and self.token_file is not None:
            raise click.UsageError("--user asks for a password, --token-file names a token: give one of them")
        proof: str | None = None
        is_of_folder = False
        if self.user is not None:
            proof = basic(self.user, self._password)
        elif self.token_file is not None:
            token = read_key_file(self.token_file).decode("ascii", "replace").strip()
            check_token(token, self.token_file)
            proof = bearer(token)
        elif os.path.isdir(self.folder) and self._may_send_token():
            is_of_folder = True
            proof = bearer(read_token(self.folder))
        elif not self.admin:
            self.existing_folder()
        elif self.client_cert is None:
            raise CommandError(
                f"nothing says who asks {self.admin}: name --token-file, --user or --client-cert, or the data folder "
                "of its server with --data-folder"
            )
        return HttpTransport(self.admin_address(), proof, self._admin_context(), is_of_folder=is_of_folder)

    def _may_send_token(self) -> bool:
        """Return whether the token of the data folder may be sent: to a server elsewhere only if a folder was named."""
        from babelbus.config import is_loopback

        if not self.admin or self.data_folder or self.config_path or os.environ.get(DATA_FOLDER_VARIABLE):
            return True
        return is_loopback(self.admin_address().rpartition(":")[0].strip("[]"))

    @cached_property
    def _password(self) -> str:
        from babelbus.cli.credentials import read_password

        return read_password(confirm=False)

    def _admin_context(self) -> "ssl.SSLContext | None":
        """Return the TLS context for the administration endpoint; `None` if the endpoint speaks plain HTTP.

        Raises:
            CommandError: a file of certificates cannot be read.
        """
        from babelbus.config import speaks_tls

        running = None if self.admin else self.running()
        if self.admin:
            needed = self.admin.startswith(HTTPS)
        elif running is not None:
            needed = running.admin_tls
        else:
            needed = speaks_tls(self.config.admin, self.config.tls)
        if not needed:
            return None
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ValueError) as error:
            raise CommandError(f"--ca {self.ca}: {error}; name a file with certificates in PEM") from error
        try:
            if self.client_cert is not None:
                context.load_cert_chain(self.client_cert, password="")
        except (OSError, ValueError) as error:
            advice = "name a file with the certificate and its key in PEM, without a password"
            raise CommandError(f"--client-cert {self.client_cert}: {error}; {advice}") from error
        if running is not None and self.ca is None:
            # The address is that of the process which holds the lock of this data folder, on this machine; its
            # certificate is for the name by which others know it.
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def admin_address(self) -> str:
        """Return "host:port" of the administration endpoint."""
        if self.admin:
            return self.admin.removeprefix(HTTPS)
        return self._address("admin", self.config.admin.host, self.config.admin.port)

    def console_address(self, told: str) -> tuple[str, bool]:
        """Return "host:port" of the console, and whether it can be reached from here; `told` is what the server says.

        A server elsewhere tells the address that it listens on, which may be one of its own machine.
        """
        from babelbus.config import is_loopback

        if self._speaks_http():
            return self.admin_address(), True
        host, _, port = told.rpartition(":")
        if self.remote is None:
            return _reachable(told), True
        own_host = self.remote.rpartition(":")[0]
        if host.strip("[]") in _ANYWHERE:
            return f"{own_host}:{port}", True
        return told, not is_loopback(host.strip("[]")) or is_loopback(own_host.strip("[]"))

    def jebp_address(self) -> str:
        """Return "host:port" of the jebp listener; with `--admin` alone, as that server tells it."""
        if self.remote:
            return self.remote
        if self.admin:
            addresses = self.api().call("GET", "/api/server")["addresses"]
            if "jebp" not in addresses:
                raise CommandError(f"the server at {self.admin} does not speak jebp: start it with --jebp-enabled")
            return _reachable(addresses["jebp"])
        return self._address("jebp", self.config.jebp.host, self.config.jebp.port)

    def _address(self, protocol: str, host: str, port: int) -> str:
        running = self.running()
        if running is not None:
            if protocol not in running.addresses:
                raise CommandError(
                    f"the server on {self.folder} has {protocol} switched off: start it with --{protocol}-enabled"
                )
            return _reachable(running.addresses[protocol])
        if port == 0:
            raise CommandError(f"no server runs on {self.folder}; start one with 'babelbus serve'")
        return _reachable(f"{host}:{port}")

    @cached_property
    def client(self) -> "BlockingClient":
        """The connected client of the server, which `close` disconnects.

        Raises:
            BabelbusError: there is no identity, or nothing listens, or the server is another than expected.
        """
        from babelbus.client import BlockingClient
        from babelbus.server.allocator import keep_freed_memory

        arguments = self.client_arguments()
        keep_freed_memory()  # exports and imports move a megabyte at a time
        client = BlockingClient(**arguments)
        with clear_errors(arguments["address"], self.login_advice()):
            return client.__enter__()

    @contextmanager
    def connect(self) -> "Iterator[BlockingClient]":
        """Return the connected client, for a `with` whose end flushes what was sent."""
        from babelbus.cli.api import SILENT_ADVICE
        from babelbus.client import RequestTimeoutError

        client = self.client
        try:
            yield client
            client.flush()
        except RequestTimeoutError as error:
            raise CommandError(f"{error}; {SILENT_ADVICE}") from error

    def close(self) -> None:
        """Disconnect."""
        client: BlockingClient | None = self.__dict__.pop("client", None)
        if client is not None:
            client.close()

    def login_advice(self) -> str:
        """Return the command that checks the connection of a context; empty without a context."""
        if self.chosen:
            return f"'babelbus login {self.chosen[0]}' checks the connection and says what to do"
        return (
            f"'babelbus login --server {self.server}' checks the connection and says what to do" if self.server else ""
        )

    def key_path(self) -> str:
        """Return the path of the key file to connect with, which may not exist."""
        if self.identity:
            return self.identity
        if self.chosen:
            return self.chosen[1].identity or own_key_path()
        path = self.conf("admin_key")
        return own_key_path() if self.server and not os.path.exists(path) and os.path.exists(own_key_path()) else path

    def client_arguments(self) -> dict[str, Any]:
        """Return the arguments of a client of the server: `address`, `identity`, `server_fingerprint`.

        Raises:
            BabelbusError: there is no identity, or the server's address is unknown.
        """
        from babelbus.protocols.jebp.identity import Identity

        path = self.key_path()
        if not os.path.exists(path):
            hint = f"{FIRST_START}, or name a key with --identity"
            if self.identity:
                hint = "name another with --identity"
            elif self.remote:
                hint = "'babelbus login' makes one, or name one with --identity"
            raise CommandError(f"there is no key file {path}; {hint}")
        return {
            "address": self.jebp_address(),
            "identity": Identity.load(path),
            "server_fingerprint": self._expected_fingerprint(),
            "request_timeout_seconds": self.timeout_seconds,
        }

    def partitions(self, topic: str) -> list[dict[str, Any]] | None:
        """Return the partitions of a topic; `None` if the server is older than jebp/1.2 and no endpoint is in reach.

        Raises:
            ApiError: there is no such topic.
            CommandError: no server runs.
        """
        from babelbus.cli.api import UnsupportedError

        try:
            partitions: list[dict[str, Any]] = self.api().topic(topic)["partitions"]
        except UnsupportedError:
            return None
        return partitions

    def _expected_fingerprint(self) -> str | None:
        """Return the fingerprint that the server's certificate must have; `None` accepts any server."""
        if self.server_fingerprint:
            return self.server_fingerprint.lower()
        if self.chosen and self.chosen[1].fingerprint:
            return self.chosen[1].fingerprint
        if self.remote:
            if not self.warned:
                self.warned = True
                how = (
                    f"'babelbus login {self.chosen[0]}' pins it"
                    if self.chosen
                    else ("pin it with --server-fingerprint ('babelbus clients list' on the server prints it)")
                )
                click.echo(f"babelbus: the server's certificate is not checked; {how}", err=True)
            return None
        return self.own_fingerprint()

    def own_fingerprint(self) -> str | None:
        """Return the fingerprint of the data folder's server; `None` before its first start."""
        from babelbus.protocols.jebp.identity import Identity

        path = self.conf("server_key")
        return Identity.load(path).fingerprint if os.path.exists(path) else None


@contextmanager
def clear_errors(address: str, advice: str = "") -> Iterator[None]:
    """Replace the error of a connection that could not be made by advice."""
    from babelbus.client import ConnectionLostError, NotAuthorisedError, UntrustedServerError

    try:
        yield
    except ConnectionLostError as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            hint = f"; {advice}" if advice else ""
            raise CommandError(f"nothing listens on {address}; start one with 'babelbus serve'{hint}") from error
        raise
    except (NotAuthorisedError, UntrustedServerError) as error:
        raise CommandError(f"{error}; {advice}" if advice else str(error)) from error


def load_config(path: str | None, flags: dict[str, object]) -> "Config":
    """Load the configuration from the file `path`, the environment of this process, and `flags`.

    Raises:
        ConfigError: the configuration is wrong.
    """
    from babelbus.config import load

    return load(path, {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}, flags)


def lock_owner(folder: str) -> int | None:
    """Return the process that owns a data folder; `None` without one.

    The number in the file is not enough: it may be of a process that is gone, and by now of another.
    """
    try:
        descriptor = os.open(os.path.join(folder, "lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # A shared lock is refused while the server has its own, and is released at once.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        return int(text) if text.isdecimal() else None
    finally:
        os.close(descriptor)
    return None


def _reachable(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{_ANYWHERE.get(host.strip('[]'), host)}:{port}"
