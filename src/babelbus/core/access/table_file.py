"""The table as a file that an operator writes: TOML with `[[rows]]` and `[[principals]]` (docs/access.md)."""

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from babelbus.config import QuotaSettings
from babelbus.core.access.model import Effect, InvalidAccessError, Principal, Row
from babelbus.identities.credential import Credential

FILE_ID: Final = '["file"]'
_INDEX = re.compile(r"\$\.(rows|principals)\[(\d+)\](?:\.(\w+))?")


class FileIds(msgspec.Struct, frozen=True):
    """The ids of the entries that the last file brought: the next file replaces them."""

    ids: tuple[str, ...]


class TableFileError(InvalidAccessError):
    """A table file is not valid; the message names the file, line and column."""

    def __init__(self, path: str, line: int, column: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}, column {column}: {reason}")
        self.line, self.column = line, column


class _Principal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    roles: tuple[str, ...] = ()
    credentials: tuple[Credential, ...] = ()
    quotas: QuotaSettings | msgspec.UnsetType = msgspec.UNSET
    root: str | msgspec.UnsetType = msgspec.UNSET


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    who: str
    action: str
    pattern: str
    effect: Effect = Effect.ALLOW


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rows: list[_Row] = []
    principals: list[_Principal] = []


def read_table_file(text: str, path: str) -> list[Row | Principal]:
    """Return the rows and principals of a table file.

    Raises:
        TableFileError: the file is not valid.
    """
    import tomllib

    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at (?:line (\d+), column (\d+)|end of document)\)", str(error))
        line, column = (int(place[1]), int(place[2])) if place and place[1] else (text.count("\n") + 1, 1)
        raise TableFileError(path, line, column, str(error).partition(" (at ")[0]) from error
    try:
        made = msgspec.convert(content, _File)
    except msgspec.ValidationError as error:
        where = _INDEX.search(str(error))
        field = re.search(r"field `(\w+)`", str(error))
        name = (where[3] if where else None) or (field[1] if field else None)
        line, column = _locate(text, where[1], int(where[2]), name) if where else _locate_key(text, name)
        raise TableFileError(path, line, column, str(error).partition(" - at ")[0]) from error
    rows = [Row(row.who, row.action, row.pattern, row.effect) for row in made.rows]
    principals = [Principal(one.name, one.roles, one.credentials, one.quotas, root=one.root) for one in made.principals]
    for index, row in enumerate(rows):
        _check(row, text, path, "rows", index)
    for index, principal in enumerate(principals):
        _check(principal, text, path, "principals", index)
        _check_lists(principal, text, path, index)
    texts = [f"row {row.effect.value} {row.who} {row.action} {row.pattern}" for row in rows]
    _check_once(texts, text, path, "rows")
    _check_once([f"principal {principal.name}" for principal in principals], text, path, "principals")
    return [*rows, *principals]


def _check_lists(principal: Principal, text: str, path: str, index: int) -> None:
    """Check that a principal has no role and no credential twice. Raises: TableFileError."""
    roles = [f"role {role}" for role in principal.roles]
    credentials = [f"{one.kind} credential {one.id}" for one in principal.credentials]
    for field, names in (("roles", roles), ("credentials", credentials)):
        twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
        if twice is not None:
            reason = f"principal {principal.name} has the {twice} twice"
            raise TableFileError(path, *_locate(text, "principals", index, field), reason)


def _check_once(names: Sequence[str], text: str, path: str, table: str) -> None:
    """Check that no two entries are called alike: the table would have one of them, and drop the other.

    Raises:
        TableFileError: two have; it names the place of the second.
    """
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        other = first.setdefault(name, index)
        if other != index:
            line, _ = _locate(text, table, other, None)
            raise TableFileError(path, *_locate(text, table, index, None), f"the {name} is in line {line} already")


def _check(entry: Row | Principal, text: str, path: str, table: str, index: int) -> None:
    try:
        entry.check()
    except InvalidAccessError as error:
        reason = str(error)
        names = ("action", "pattern", "who") if isinstance(entry, Row) else ("name", "roles", "root")
        name = next((name for name in names if name in reason.split(":")[0]), names[-1] if len(names) == 3 else "name")
        raise TableFileError(path, *_locate(text, table, index, name), reason) from error


def _locate(text: str, table: str, index: int, name: str | None) -> tuple[int, int]:
    """Return line and column of a key of the `index`-th table of a name, or of the table's head."""
    head = re.compile(rf"^\s*\[\[\s*{table}\s*\]\]")
    any_head, key = re.compile(r"^\s*\["), re.compile(rf"^\s*({name})\s*=") if name else None
    seen, found = -1, (1, 1)
    for number, line in enumerate(text.splitlines(), 1):
        if head.match(line):
            seen += 1
            if seen == index:
                found = number, len(line) - len(line.lstrip()) + 1
        elif seen == index:
            if any_head.match(line):
                break
            match = key.match(line) if key else None
            if match:
                return number, match.start(1) + 1
    return found


def _locate_key(text: str, name: str | None) -> tuple[int, int]:
    """Return line and column of a name that no table file has, else the beginning."""
    if name is not None:
        for number, line in enumerate(text.splitlines(), 1):
            at = line.find(name)
            if at >= 0:
                return number, at + 1
    return 1, 1
