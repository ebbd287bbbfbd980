"""Completion knows the words of the server, and is silent without one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.shell import COMMAND, ENVIRONMENT, Served, Shell
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.terminal import Terminal

LATER = f"from babelbus.cli import completion; completion.ANSWER_SECONDS = {SAFETY_NET_SECONDS}"
PATIENT = [COMMAND[0], "-c", f"{LATER}; {COMMAND[2]}"]
"""A completion that is not silent after a second, in which a busy machine has not asked yet."""


def complete(shell: Shell, *words: str, **variables: str) -> list[str]:
    """Return the words that bash would offer for the last one."""
    done = subprocess.run(
        PATIENT, cwd=shell.folder, text=True, capture_output=True, check=False, timeout=SAFETY_NET_SECONDS,
        env=ENVIRONMENT | variables | {
            "_BABELBUS_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(("babelbus", *words)),
            "COMP_CWORD": str(len(words)),
        },
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_topics_groups_and_keys_are_known(served: Served) -> None:
    served.run("topics", "create", "orders")
    served.run("groups", "create", "orders", "billing")
    served.run("state", "set", "plant/line1/temp", "1")
    assert complete(served, "topics", "show", "ord") == ["orders"]
    assert complete(served, "groups", "show", "orders", "") == ["billing"]
    assert complete(served, "consume", "orders", "--group", "b") == ["billing"]
    assert complete(served, "state", "get", "pl") == ["plant/"]
    assert complete(served, "state", "get", "plant/line1/") == ["plant/line1/temp"]
    assert "status" in complete(served, "sta")


def test_contexts_are_known_and_a_server_that_is_not_there_is_met_with_silence(shell: Shell) -> None:
    config = shell.folder / "config"
    done = subprocess.run(
        [*COMMAND, "context", "add", "prod", "--server", "127.0.0.1:1"], cwd=shell.folder, check=False,
        env=ENVIRONMENT | {"XDG_CONFIG_HOME": str(config)},
    )  # fmt: skip
    assert done.returncode == 0
    assert complete(shell, "context", "use", "p", XDG_CONFIG_HOME=str(config)) == ["prod"]
    assert complete(shell, "topics", "show", "", XDG_CONFIG_HOME=str(config), BABELBUS_CONTEXT="prod") == []
    assert complete(shell, "topics", "show", "") == []


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_script_is_installed_where_the_shell_finds_it(shell: Shell, tmp_path: Path, name: str) -> None:
    home = tmp_path / "home"
    done = subprocess.run(
        [*COMMAND, "completion", name, "--install"], env=ENVIRONMENT | {"HOME": str(home)}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    path = done.stdout.partition(" is written")[0]
    assert path.startswith(str(home))
    assert "_BABELBUS_COMPLETE" in Path(path).read_text()
    assert os.path.isfile(path)


SHELLS = {
    "bash": (["bash", "--norc", "-i"], ". ~/.local/share/bash-completion/completions/babelbus"),
    "zsh": (["zsh", "-f", "-i"], "fpath+=~/.zfunc; autoload -Uz compinit; compinit -u"),
    "fish": (["fish", "-i"], "true"),
}
"""Each shell without the files of the developer, and the line that the documentation asks for."""


@pytest.mark.parametrize("name", SHELLS)
def test_the_installed_script_completes_a_topic_in_the_real_shell(served: Served, tmp_path: Path, name: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"the completion of {name} is not tried: {name} is not installed")
    served.run("topics", "create", f"zebra-{name}")
    home, tools = tmp_path / "home", tmp_path / "tools"
    home.mkdir()
    tools.mkdir()
    (tools / "babelbus").write_text("#!/bin/sh\nexec " + " ".join(f"'{part}'" for part in PATIENT) + ' "$@"\n')
    (tools / "babelbus").chmod(0o755)
    environment = ENVIRONMENT | {"HOME": str(home), "PATH": f"{tools}:{os.environ['PATH']}", "XDG_CONFIG_HOME": ""}
    subprocess.run([*COMMAND, "completion", name, "--install"], env=environment, check=True, capture_output=True)
    command, preparation = SHELLS[name]
    with Terminal(command, served.folder, environment) as terminal:
        terminal.type(f"{preparation}\n")
        terminal.type("babelbus topics show ze\t")
        terminal.expect(f"zebra-{name}", again="\t")
