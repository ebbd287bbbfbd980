"""The lists of clients and topics that an operator may edit by hand (docs/specifications/jebp.md, section 3).

Three text files in `<data>/conf`, one entry a line, blank lines and lines that begin with `#` ignored: who may connect
(`client_fingerprints`), who may administer (`client_admin_rights`), and which topics there are (`topics`).
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from urllib.parse import quote, unquote

import msgspec

from babelbus.core.access import ADMIN_ROLE, ANONYMOUS, CLIENT_ROLE, Credential, InvalidAccessError, Principal
from babelbus.core.access.model import check_name
from babelbus.core.subject import check_topic_name
from babelbus.errors import ConfigError, InvalidTopicNameError
from babelbus.storage.contract import PARTITIONS_MAX
from babelbus.storage.files import FileSystem

log = logging.getLogger(__name__)

FINGERPRINTS_NAME = "client_fingerprints"
ADMINS_NAME = "client_admin_rights"
TOPICS_NAME = "topics"
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
# What a line of the list of topics cannot hold as it is: a comment's sign in front, blanks at an end, other line ends.
_ENCODED = re.compile(r"%|^#|^\s+|\s+$|[^\S ]")


def source_of(name: str) -> str:
    """Return the source of events that a client of the lists publishes."""
    return f"jebp:{name}"


class ClientEntry(msgspec.Struct, frozen=True):
    """One client that may connect."""

    fingerprint: str
    name: str
    admin: bool


class AccessLists:
    """The three files of one data folder. Reading them again replaces what was known, or changes nothing."""

    def __init__(self, files: FileSystem, folder: str) -> None:
        self._files = files
        self._folder = folder
        self.clients: dict[str, ClientEntry] = {}
        self._written: set[str] | None = None

    def reload(self) -> None:
        """Read the lists of clients; a missing file counts as empty.

        Raises:
            ConfigError: a line is wrong; the message names file and line, and the previous lists stay valid.
        """
        names: dict[str, str] = {}
        for number, line in self._lines(FINGERPRINTS_NAME):
            fingerprint, *name = line.split(maxsplit=1)
            names[self._check(FINGERPRINTS_NAME, number, fingerprint)] = name[0] if name else fingerprint[:16]
        admins = {self._check(ADMINS_NAME, number, line) for number, line in self._lines(ADMINS_NAME)}
        for fingerprint in admins - set(names):
            log.warning("%s has %s, which is not in %s: ignored", ADMINS_NAME, fingerprint, FINGERPRINTS_NAME)
        self.clients = {
            fingerprint: ClientEntry(fingerprint, name, fingerprint in admins) for fingerprint, name in names.items()
        }

    def entries(self, is_taken: Callable[[str], bool] = lambda name: False) -> list[Principal]:
        """Return the clients as principals of the table of access.

        Names that are not unique, that a principal of the table has, or that strangers have, get the beginning of the
        fingerprint: rights belong to a key, and must not be those of another key of the same name.
        """
        names = Counter(entry.name for entry in self.clients.values())
        return [
            Principal(
                entry.name
                if names[entry.name] == 1 and entry.name != ANONYMOUS and not is_taken(entry.name)
                else f"{entry.name}-{fingerprint[:16]}",
                (ADMIN_ROLE if entry.admin else CLIENT_ROLE,),
                (Credential("jebp", fingerprint, {"fingerprint": fingerprint}),),
            )
            for fingerprint, entry in self.clients.items()
        ]

    # -- changing ----------------------------------------------------------------------------------------------------

    def put(self, entry: ClientEntry) -> None:
        """Add a client, or change the name and rights of an existing one; durable when this returns.

        A client keeps the name that it has, also when no principal may be called so any more.

        Raises:
            ConfigError: the fingerprint or the name is not valid.
        """
        self._check(FINGERPRINTS_NAME, 0, entry.fingerprint)
        old = self.clients.get(entry.fingerprint)
        if old is None or old.name != entry.name:
            try:
                check_name(entry.name)
            except InvalidAccessError as error:
                raise ConfigError(str(error)) from error
        self._rewrite(FINGERPRINTS_NAME, entry.fingerprint, f"{entry.fingerprint} {entry.name}")
        self._rewrite(ADMINS_NAME, entry.fingerprint, entry.fingerprint if entry.admin else None)
        self.reload()

    def remove(self, fingerprint: str) -> None:
        """Remove a client from both lists; its connections are closed at the next reload."""
        self._rewrite(ADMINS_NAME, fingerprint, None)
        self._rewrite(FINGERPRINTS_NAME, fingerprint, None)
        self.reload()

    def _rewrite(self, name: str, fingerprint: str, line: str | None) -> None:
        """Replace the line of this fingerprint by `line`; comments and order stay."""
        lines, placed = [], line is None
        for old in self._read(name).splitlines():
            if old.split(maxsplit=1)[:1] != [fingerprint]:
                lines.append(old)
            elif not placed and line is not None:
                lines.append(line)
                placed = True
        if not placed and line is not None:
            lines.append(line)
        self._write(name, lines)

    # -- topics ------------------------------------------------------------------------------------------------------

    def read_topics(self) -> dict[str, int]:
        """Return the topics of the list with their numbers of partitions.

        Raises:
            ConfigError: a line is wrong; the message names file and line.
        """
        topics = {}
        for number, line in self._lines(TOPICS_NAME):
            try:
                name, count = _read_topic(line)
                check_topic_name(name)
            except (InvalidTopicNameError, UnicodeDecodeError) as error:
                raise ConfigError(f"{self._path(TOPICS_NAME)}, line {number}: {error}") from error
            if not 1 <= count <= PARTITIONS_MAX:
                where = f"{self._path(TOPICS_NAME)}, line {number}"
                raise ConfigError(f"{where}: a topic has 1 to {PARTITIONS_MAX} partitions, not {count}")
            topics[name] = count
        return topics

    def write_topics(self, topics: Iterable[tuple[str, int]]) -> None:
        """Update the list of topics; comments, order, and topics that an operator is just adding by hand stay."""
        left = dict(topics)
        names, before = set(left), self._written
        ends = {count: f" {count}" for count in set(left.values())}
        lines = []
        for old in self._read(TOPICS_NAME).splitlines():
            line = old.strip()
            if not line or line.startswith("#"):
                lines.append(old)
                continue
            try:
                name, _ = _read_topic(line)
            except UnicodeDecodeError:
                name = ""
            count = left.pop(name, None)
            if count is not None:  # most lines stay as they are: to encode ten thousand names takes 10 ms
                lines.append(old if old.endswith(ends[count]) else _encode_name(name) + ends[count])
            # At the first write what is not there was removed, later only what was there before.
            elif before is not None and name not in before and name not in names:
                lines.append(old)
        lines += [f"{_encode_name(name)} {count}" for name, count in sorted(left.items())]
        try:
            self._write(TOPICS_NAME, lines)
        except OSError:
            if before is not None:  # the file has the lines of the last write, or of this one
                self._written = before | names
            raise
        self._written = names

    # -- files -------------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _read(self, name: str) -> str:
        try:
            return self._files.read_file(self._path(name)).decode()
        except FileNotFoundError:
            return ""
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._path(name)} is not UTF-8: {error}") from error

    def _lines(self, name: str) -> list[tuple[int, str]]:
        lines = [(number, line.strip()) for number, line in enumerate(self._read(name).splitlines(), 1)]
        return [(number, line) for number, line in lines if line and not line.startswith("#")]

    def _write(self, name: str, lines: list[str]) -> None:
        self._files.make_folder(self._folder)
        self._files.replace_file(self._path(name), "".join(f"{line}\n" for line in lines).encode())

    def _check(self, name: str, number: int, fingerprint: str) -> str:
        if not _FINGERPRINT.fullmatch(fingerprint):
            raise ConfigError(
                f"{self._path(name)}, line {number}: {fingerprint!r} is no fingerprint (64 lower-case hex digits)"
            )
        return fingerprint


def _read_topic(line: str) -> tuple[str, int]:
    """Return name and partitions of a line of the list of topics; without a number it is 1.

    Raises:
        UnicodeDecodeError: the percent signs of the name do not give UTF-8.
    """
    name, _, count = line.rpartition(" ")
    if not name or not count.isdecimal():
        name, count = line, "1"
    return unquote(name.strip(), errors="strict"), int(count)


def _encode_name(name: str) -> str:
    """Write a topic's name so that a line of the list gives it back: no comment, no blank at an end, one line."""
    return _ENCODED.sub(lambda found: quote(found[0], safe=""), name)
