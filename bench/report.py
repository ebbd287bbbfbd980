"""Results as a table for people and as bench/results.json for programs."""

import os
from collections.abc import Sequence

import msgspec
from rich.table import Table

from bench.frame import UNIFORM_RATIO_MIN, PeerResult, Result

RESULTS_PATH = os.path.join(os.path.dirname(__file__), "results.json")


def table(results: Sequence[Result]) -> Table:
    """One line per figure with its strongest peer, and one line more for each other peer."""
    grid = Table(title="median of each figure; ratio = ours / the peer's")
    for heading in ("name", "value", "unit", "target", "peer", "peer value", "ratio", "note"):
        grid.add_column(heading, justify="right" if heading in ("value", "target", "peer value", "ratio") else "left")
    for result in results:
        strongest = result.strongest_peer
        others = [peer for peer in result.peers if peer is not strongest]
        first = strongest or (others.pop(0) if others else None)
        value = f"[{'green' if result.meets_target else 'red'}]{number(result.value)}[/]"
        target = number(result.figure.target)
        grid.add_row(result.figure.name, value, result.figure.unit, target, *_peer_cells(result, first, result.note))
        for peer in others:
            grid.add_row("", "", "", "", *_peer_cells(result, peer, ""))
    return grid


def _peer_cells(result: Result, peer: PeerResult | None, note: str) -> tuple[str, str, str, str]:
    if peer is None:
        return "", "", "", note
    ratio = f"{result.value / peer.value:.2f}" if peer.value else ""
    remarks = "; ".join(remark for remark in (note, f"peer {peer.note}" if peer.note else "") if remark)
    return peer.name, number(peer.value), ratio, remarks


def floors_table(results: Sequence[Result]) -> Table:
    """Return one line per figure that has a floor: whether the floor and the ratio to the uniform twin hold."""
    grid = Table(title=f"mixed traffic; ratio = mixed / uniform, at least {UNIFORM_RATIO_MIN}")
    for heading in ("name", "value", "unit", "floor", "uniform twin", "its value", "ratio", "holds"):
        grid.add_column(heading, justify="right" if heading in ("value", "floor", "its value", "ratio") else "left")
    for result in results:
        if result.figure.floor is None:
            continue
        values = result.figure.name, number(result.value), result.figure.unit, number(result.figure.floor)
        ratio = "" if result.uniform_ratio is None else f"{result.uniform_ratio:.2f}"
        failures = ", ".join(result.failures)
        holds = f"[red]no: below {failures}[/]" if failures else "[green]yes[/]"
        grid.add_row(*values, result.figure.uniform or "", number(result.uniform_value), ratio, holds)
    return grid


def peers_table(results: Sequence[Result]) -> Table:
    """The peers that were measured as figures of their own."""
    grid = Table(title="peers, median of each")
    for heading in ("peer", "value", "unit", "note"):
        grid.add_column(heading, justify="right" if heading == "value" else "left")
    for result in results:
        grid.add_row(result.figure.name, number(result.value), result.figure.unit, result.note)
    return grid


def number(value: float | None) -> str:
    """A value as people read it: 1,234,567 and 12.3; nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.1f}"


def write_json(results: Sequence[Result], path: str = RESULTS_PATH) -> None:
    """Write the list of figures; `note` carries latencies and what became of the other peers."""
    rows = [_row(result) for result in results]
    with open(path, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")


def _row(result: Result) -> dict[str, str | float | bool | None]:
    strongest = result.strongest_peer
    notes = [result.note] if result.note else []
    for peer in result.peers:
        value = "" if peer is strongest or peer.value is None else number(peer.value)
        said = " ".join(part for part in (value, peer.note) if part)
        notes += [f"{peer.name}: {said}"] if said else []
    return {
        "name": result.figure.name,
        "value": result.value,
        "unit": result.figure.unit,
        "peer": strongest.name if strongest else None,
        "peer_value": strongest.value if strongest else None,
        "ratio": result.ratio,
        "floor": result.figure.floor,
        "uniform": result.figure.uniform,
        "uniform_value": result.uniform_value,
        "uniform_ratio": result.uniform_ratio,
        "holds": not result.failures,
        "note": "; ".join(notes),
    }
