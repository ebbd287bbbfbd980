"""`babelbus console`: log a browser in at the console (docs/console.md)."""

import os
import sys
import webbrowser

import click

from babelbus.cli.command import BusCommand, CommandError, examples, json_option
from babelbus.cli.output import note, print_json, print_line
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options

SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Variables of a session that can show a browser."""


@click.command(
    "console",
    cls=BusCommand,
    epilog=examples(
        "babelbus console                    the server here, or of the context in use",
        "babelbus console --context prod",
        "babelbus console --no-browser       print the address, open nothing",
    ),
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
@json_option
@bus_options
def console(target: Target, no_browser: bool, as_json: bool) -> None:
    """Print an address that logs a browser in at the console, and open it where there is a browser.

    The address works once, within a minute. The log-in may do what the command may.
    """
    answer = target.api().call("POST", "/api/console/links")
    address, is_near = target.console_address(answer["address"])
    scheme = "https" if answer["tls"] else "http"
    url = f"{scheme}://{address}/#/login?code={answer['code']}"
    if as_json:
        print_json({"url": url, "expires_ms": answer["expires_ms"]})
        return
    print_line(url)
    if not is_near:
        port = address.rpartition(":")[2]
        host = (target.remote or "").rpartition(":")[0]
        note(
            f"the console of that server listens on its own machine alone: 'ssh -L {port}:{address} {host}' reaches it"
        )
    note("the address logs in once, within a minute")
    if is_near and not no_browser and has_screen():
        _open(url)


def has_screen() -> bool:
    """Return whether a browser can be opened for the person at this terminal."""
    return sys.stdout.isatty() and (sys.platform in ("darwin", "win32") or any(map(os.environ.get, SCREENS)))


def _open(url: str) -> None:
    try:
        opened = webbrowser.open(url)
    except webbrowser.Error as error:
        raise CommandError(f"no browser could be opened ({error}): open the address yourself") from error
    if not opened:
        note("no browser could be opened: open the address yourself")
