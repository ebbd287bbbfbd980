"""The quotas of a principal on the command line: the option `--quota`, and the table that `principals show` prints."""

from collections.abc import Callable
from typing import Any

import click
import msgspec

from babelbus.cli.output import print_table
from babelbus.config import QuotaSettings
from babelbus.units import UnitError, format_size, parse_size

NAMES = tuple(field.name for field in msgspec.structs.fields(QuotaSettings))
BYTES = "_bytes_per_second"
NONE = "none"

Command = Callable[..., Any]


def _read_quotas(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, int | None]:
    quotas: dict[str, int | None] = {}
    for value in values:
        name, _, limit = value.partition("=")
        name = name.strip().replace("-", "_")
        if name not in NAMES:
            raise click.BadParameter(f"{value!r} is no NAME=LIMIT: a name is one of {', '.join(NAMES)}", ctx, param)
        try:
            quotas[name] = None if limit.strip() == NONE else _read_limit(name, limit.strip())
        except ValueError as error:
            raise click.BadParameter(f"{name}: {error}", ctx, param) from error
    return quotas


def _read_limit(name: str, limit: str) -> int:
    """Return a limit: a size for bytes, else a count.

    Raises:
        ValueError: the text is no such limit.
    """
    if name.endswith(BYTES):
        try:
            count = parse_size(limit)
        except UnitError as error:
            raise ValueError(str(error)) from error
    elif limit.isascii() and limit.isdigit():
        count = int(limit)
    else:
        raise ValueError(f"{limit!r} is no whole number")
    if not count:
        raise ValueError(f"a limit is at least 1, or {NONE!r}")
    return count


quota_option: Callable[[Command], Command] = click.option(
    "--quota", "quotas", multiple=True, metavar="NAME=LIMIT", callback=_read_quotas,
    help="A limit of its own, as publish_bytes_per_second=1MiB or connections=2, or none; may be given several times. "
    f"Names: {', '.join(NAMES)}.  [default: the server's quotas]",
)  # fmt: skip


def show_quotas(principal: dict[str, Any]) -> None:
    """Print the limits of a principal and what it uses, if there are any."""
    quotas, used = principal.get("quotas", {}), principal.get("used", {})
    rows = [
        (name, _show_limit(name, quotas.get(name)) if "quotas" in principal else "the server's", used.get(name, 0))
        for name in NAMES
        if name in quotas or name in used
    ]
    if rows:
        print_table(("Quota", "Limit", "Used"), rows)
    elif "quotas" in principal:
        print_table(("Quota", "Limit", "Used"), [("all", NONE, "")])


def _show_limit(name: str, limit: float | None) -> str:
    if limit is None:
        return NONE
    return f"{format_size(int(limit))}/s" if name.endswith(BYTES) else str(limit)
