"""`python -m bench [--only jebp] [--repeat 5]`: measure the figures, print them, write bench/results.json."""

import importlib
import pkgutil
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

import click
import msgspec
from rich.console import Console

import bench
from bench import frame, machine, peers, report


@click.command()
@click.option("--only", envvar="ONLY", default="", help="Measure the figures whose name starts so (environment: ONLY).")
@click.option("--repeat", default=5, type=click.IntRange(min=1), help="Measurements per figure; the median counts.")
@click.option("--list", "list_only", is_flag=True, help="Print the names of the figures and stop.")
@click.option("--no-peers", is_flag=True, help="Measure our own figures only; nothing is written.")
@click.option("--peers", "peers_only", is_flag=True, help="Measure the peers only (--only selects them by name).")
def main(*, only: str, repeat: int, list_only: bool, no_peers: bool, peers_only: bool) -> None:
    """Measure the figures of this machine, each against its peers in the same run."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    if peers_only:
        chosen = [figure for figure in peers.alone() if figure.name.startswith(only)]
    else:
        _load_figures()
        chosen = [figure for figure in frame.FIGURES.values() if figure.name.startswith(only)]
    if not chosen:
        raise click.ClickException(f"no figure starts with {only!r}")
    if list_only:
        click.echo("\n".join(figure.name for figure in chosen))
        return
    console.print(machine.describe(), highlight=False)
    if no_peers:
        chosen = [msgspec.structs.replace(figure, peers=()) for figure in chosen]
    signal.signal(signal.SIGTERM, _end_with_exit)
    results, failed = _measure(chosen, repeat)
    console.print(report.peers_table(results) if peers_only else report.table(results))
    if any(result.figure.floor is not None for result in results):
        console.print(report.floors_table(results))
    if not (peers_only or no_peers):
        report.write_json(results)
        console.print(f"written: {report.RESULTS_PATH}", highlight=False)
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


def _load_figures() -> None:
    # A module in this folder registers its figures when it is imported; to add one is to add a file.
    for module in pkgutil.iter_modules(bench.__path__):
        if not module.ispkg and module.name != "__main__":
            importlib.import_module(f"bench.{module.name}")


def _measure(chosen: Sequence[frame.Figure], repeat: int) -> tuple[list[frame.Result], list[str]]:
    """The results, and the names of the figures that failed: one that breaks must not cost the others' minutes."""
    console = Console(stderr=True, soft_wrap=True)
    results, failed = [], []
    with console.status("") as status:
        for position, figure in enumerate(chosen, start=1):
            prefix = f"[{position}/{len(chosen)}] {figure.name}"
            try:
                result = frame.run(figure, repeat, status.update)
            except frame.PeerMissingError as missing:  # of a figure: only `--peers` measures peers as figures
                console.print(f"{prefix}: skipped: {missing}", markup=False, highlight=False)
            except Exception:
                console.print(f"{prefix}: failed", markup=False, highlight=False)
                console.print_exception()
                failed.append(figure.name)
            else:
                # Told at once as well: a run takes minutes, and one that is broken off has said what it knew.
                console.print("\n".join(_lines(prefix, result)), markup=False, highlight=False)
                results.append(result)
    return results, failed


def _lines(prefix: str, result: frame.Result) -> Iterator[str]:
    yield f"{prefix}: {report.number(result.value)} {result.figure.unit} {result.note}".rstrip()
    if result.figure.floor is not None:
        yield f"    floor {report.number(result.figure.floor)}: {'holds' if result.meets_floor else 'missed'}"
    if result.uniform_ratio is not None:
        twin = f"{result.uniform_ratio:.2f} of {result.figure.uniform} ({report.number(result.uniform_value)})"
        yield f"    {twin}: {'holds' if result.meets_uniform_ratio else f'missed, at least {frame.UNIFORM_RATIO_MIN}'}"
    for peer in result.peers:
        yield "    " + " ".join(part for part in (f"{peer.name}:", report.number(peer.value), peer.note) if part)


def _end_with_exit(signal_number: int, _: object) -> NoReturn:
    # As an exception, so that the servers of the peers are stopped and their folders removed on the way out.
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    main()
