"""`babelbus cluster`: the members of a cluster, which of them owns the data, and a move to another member."""

import time
from typing import TYPE_CHECKING, Any

import click

from babelbus.cli.command import BusGroup, CommandError, examples, json_option
from babelbus.cli.output import human_time, plural, print_json, print_line, print_table
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options
from babelbus.clock import SystemClock

if TYPE_CHECKING:
    from babelbus.cli.api import AdminApi

LOOK_SECONDS = 0.1
"""How often it looks whether the new owner is there."""


@click.group(cls=BusGroup)
def cluster() -> None:
    """Show the members of a cluster, and move the data to another member.

    Ask any member: it passes the request on to the owner of the data.
    """


@cluster.command(
    epilog=examples(
        "babelbus cluster status                  of the member here, or of the context in use",
        "babelbus cluster status --json | jq -r .owner",
    )
)
@json_option
@bus_options
def status(target: Target, as_json: bool) -> None:
    """Show members, owner, epoch, versions, servers of NATS and links.

    Exit code 0 if all members are there, 1 if one is away.
    """
    found = target.api().call("GET", "/api/cluster")
    if as_json:
        print_json(found)
    else:
        _show(found)
    if any(one["role"] == "away" for one in found["members"]):
        click.get_current_context().exit(1)


def _show(found: dict[str, Any]) -> None:
    nats = ", ".join(found["nats_servers"])
    print_line(
        f"owner {found['owner']} at {found['address']} since {human_time(found['since_ms'])}, epoch {found['epoch']}"
    )
    print_line(
        f"lease of {found['lease_seconds']:g} s, valid for {found['lease_rest_seconds']:.1f} s; NATS {nats}"
        f" (connected to {found['nats'] or 'none'}), prefix {found['prefix']}"
    )
    links = {one["name"]: one["peer"] for one in found["links"]} | {found["owner"]: "own"}
    print_table(
        ("Member", "Role", "Host", "Version", "Link", "Clients", "NATS", "Since", "Heard"),
        [
            (
                one["name"], one["role"], one["host"], one["version"], links.get(one["name"], "none"),
                one["connections"], one["nats"] or "none", human_time(one["since_ms"]),
                f"{one['heard_seconds']:.0f} s ago",
            )
            for one in found["members"]
        ],
    )  # fmt: skip


@cluster.command(
    epilog=examples(
        "babelbus cluster move                    to any member that is linked",
        "babelbus cluster move --to bus2          before bus1 is upgraded",
    )
)
@click.option("--to", metavar="NAME", help="The member that shall own the data.  [default: one that is linked]")
@click.option("--timeout", type=click.FloatRange(0.1), default=30.0, show_default=True, help="Seconds to wait for it.")
@json_option
@bus_options
def move(target: Target, to: str | None, timeout: float, as_json: bool) -> None:
    """Move the data to another member, and wait until that member owns it.

    The owner answers what it was asked, and gives its lease away. Connections of clients end once and are made again.
    """
    clock = SystemClock()
    begun = target.api().call("POST", "/api/cluster/move", {"to": to})
    began = clock.monotonic()
    target.close()
    while clock.monotonic() - began < timeout:
        found = _look(target.api())
        if found is not None and found["epoch"] > begun["epoch"]:
            seconds = clock.monotonic() - began
            done = {"from": begun["from"], "to": found["owner"], "epoch": found["epoch"], "seconds": round(seconds, 3)}
            if as_json:
                print_json(done)
            else:
                print_line(f"{done['to']} owns the data, after {seconds:.1f} s; before it was {done['from']}")
            if found["owner"] != begun["to"]:
                raise CommandError(f"{begun['to']} did not take over in time, {found['owner']} did")
            return
        target.close()
        time.sleep(LOOK_SECONDS)
    raise CommandError(f"{begun['to']} does not own the data after {plural(int(timeout), 'second')}: look at its log")


def _look(api: "AdminApi") -> dict[str, Any] | None:
    """Return the status, `None` while no owner answers."""
    try:
        return api.call("GET", "/api/cluster")
    except (CommandError, OSError):
        return None
