"""Running commands: what they get, what ends them, and signals at the worst moment."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from babelbus.cli.execute import SIGNALS, Interrupts, run_command

ENVIRONMENT = {b"PATH": os.environb[b"PATH"], b"WORD": b"hello"}


def test_a_command_gets_its_input_and_its_environment_and_its_code_is_given() -> None:
    told = run_command('test "$(cat)$WORD" = payloadhello', b"payload", ENVIRONMENT, Interrupts())
    assert told == 0
    assert run_command("exit 3", b"x" * 10**6, ENVIRONMENT, Interrupts()) == 3  # which nobody reads
    assert run_command("kill -9 $$", b"", ENVIRONMENT, Interrupts()) == -signal.SIGKILL


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_comes_while_a_block_is_held_is_raised_behind_it(number: int) -> None:
    interrupts, seen = Interrupts(), []
    before = signal.getsignal(number)

    def block() -> None:
        with interrupts.raised():
            with interrupts.held():
                signal.raise_signal(number)
                seen.append("the rest of the block")
            seen.append("never")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert seen == ["the rest of the block"]
    assert signal.getsignal(number) is before


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts().raised():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_outside_is_raised_at_once() -> None:
    interrupts = Interrupts()
    with pytest.raises(KeyboardInterrupt), interrupts.raised():
        signal.raise_signal(signal.SIGTERM)


def test_a_command_is_stopped_with_all_that_it_started_even_by_a_signal_that_comes_while_it_starts(
    tmp_path: Path,
) -> None:
    interrupts = Interrupts()
    # It sends the signal itself, as early as can be: while we are still in the call that starts it.
    command = f"echo $$ > {tmp_path}/group; kill -TERM {os.getpid()}; sleep 600; true"
    with pytest.raises(KeyboardInterrupt), interrupts.raised():
        run_command(command, b"", ENVIRONMENT, interrupts)
    group = int((tmp_path / "group").read_text())
    states = [state for leader, state in processes() if leader == group]
    assert set(states) <= {"Z"}


def processes() -> list[tuple[int, str]]:
    """The process group and the state of each process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, group, *_ = path.read_text().rpartition(")")[2].split()
            found.append((int(group), state))
    return found
