"""`babelbus completion`: the scripts for bash, zsh and fish, and the words that only the server knows."""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from babelbus.cli.command import BusCommand, CommandError, examples
from babelbus.cli.contexts import LOCAL, load
from babelbus.cli.output import print_line
from babelbus.cli.target import Target
from babelbus.cli.target_options import target_values

if TYPE_CHECKING:
    from babelbus.cli.api import AdminApi

SHELLS = ("bash", "zsh", "fish")
ANSWER_SECONDS = 1.0
"""How long TAB may wait for the server."""
KEYS_MAX = 200
COMPLETE_VARIABLE = "_BABELBUS_COMPLETE"

# Where each shell looks for the scripts of a user, below the home folder.
_PLACES = {
    "bash": ".local/share/bash-completion/completions/babelbus",
    "zsh": ".zfunc/_babelbus",
    "fish": ".config/fish/completions/babelbus.fish",
}
_THEN = {
    "bash": "open a new shell (it needs the package bash-completion)",
    "zsh": "put 'fpath+=~/.zfunc; autoload -Uz compinit; compinit' into ~/.zshrc, and open a new shell",
    "fish": "open a new shell",
}


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus completion bash --install",
        "babelbus completion zsh --install",
        "babelbus completion fish > ~/.config/fish/completions/babelbus.fish",
        "source <(babelbus completion bash)               in this shell alone",
    ),
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.option("--install", is_flag=True, help="Write the script where the shell finds it.")
def completion(shell: str, install: bool) -> None:
    """Print the script that lets SHELL complete commands, options, contexts, topics, groups and keys.

    The words are asked of the server that the command would use, for a second at the most.
    """
    program = click.get_current_context().find_root().command
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(program, {}, "babelbus", COMPLETE_VARIABLE).source()
    if not install:
        print_line(script.rstrip())
        return
    path = os.path.join(os.path.expanduser("~"), _PLACES[shell])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(path):
        raise CommandError(f"{path} is a link: write the script there yourself with 'babelbus completion {shell}'")
    with open(path, "w", encoding="utf-8") as file:
        file.write(script)
    print_line(f"{path} is written; {_THEN[shell]}")


# -- words -----------------------------------------------------------------------------------------------------------

Words = Callable[["AdminApi", click.Context, str], Iterable[str]]


def complete(kind: str, command: click.Context, begun: str) -> list[CompletionItem]:
    """Return the words of a kind ("topics", "keys", ...) that begin so; silent where no server answers in time."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, ANSWER_SECONDS)
    found: list[CompletionItem] = []
    with _silence():
        if kind == "contexts":
            found = _items(contexts(), begun)
        else:
            target = Target(**target_values(command), warned=True)
            found = _items(KINDS[kind](target.api(), command, begun), begun)
    return found


def topics(api: "AdminApi", command: click.Context, begun: str) -> Iterable[str]:
    """Return the names of topics."""
    return (topic["name"] for topic in _ask(api, "/api/topics", {})["topics"])


def groups(api: "AdminApi", command: click.Context, begun: str) -> Iterable[str]:
    """Return the names of the groups of the topic that stands before, or of all."""
    topic = command.params.get("topic")
    found = _ask(api, "/api/groups", {} if topic is None else {"topic": topic})["groups"]
    return (group["name"] for group in found)


def dead_letters(api: "AdminApi", command: click.Context, begun: str) -> Iterable[str]:
    """Return the topics of dead letters, and the groups that send there."""
    for letters in _ask(api, "/api/dead-letters", {})["dead_letters"]:
        yield letters["topic"]
        yield from (sender["group"] for sender in letters["senders"])


def principals(api: "AdminApi", command: click.Context, begun: str) -> Iterable[str]:
    """Return the names of principals."""
    return (one["name"] for one in _ask(api, "/api/principals", {})["principals"])


def clients(api: "AdminApi", command: click.Context, begun: str) -> Iterable[str]:
    """Return the names of clients."""
    return (one["name"] for one in _ask(api, "/api/clients", {})["clients"])


def keys(api: "AdminApi", command: click.Context, begun: str) -> Iterable[str]:
    """Return the keys of the state below the part that is written, or the next element of the keys."""
    folder = begun.rpartition("/")[0]
    pattern = f"{folder}/#" if folder else "#"
    depth = len(begun.split("/"))
    found: dict[str, None] = {}
    for line in api.lines("/api/state/values", {"pattern": pattern}, dict[str, Any], timeout_seconds=ANSWER_SECONDS):
        if line is None or not str(line["key"]).startswith(begun):
            continue
        parts = str(line["key"]).split("/")
        found["/".join(parts[:depth]) + ("/" if len(parts) > depth else "")] = None
        if len(found) >= KEYS_MAX:
            break
    return found


def contexts() -> Iterable[str]:
    """Return the names of contexts."""
    return (*load().contexts, LOCAL)


KINDS: dict[str, Words] = {
    "topics": topics,
    "groups": groups,
    "dead_letters": dead_letters,
    "principals": principals,
    "clients": clients,
    "keys": keys,
}


def _items(found: Iterable[str], begun: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in dict.fromkeys(found) if word.startswith(begun)]


def _ask(api: "AdminApi", path: str, query: dict[str, str]) -> dict[str, Any]:
    return api.ask("GET", path, query, dict[str, Any], timeout_seconds=ANSWER_SECONDS)


@contextmanager
def _silence() -> Iterator[None]:
    """Drop every failure and every word on standard error: the user is typing, and nothing was asked of us."""
    with open(os.devnull, "w") as nowhere:
        before, sys.stderr = sys.stderr, nowhere
        try:
            yield
        except Exception:  # noqa: S110  # whatever it is, a completion has no words to say it
            pass
        finally:
            sys.stderr = before
