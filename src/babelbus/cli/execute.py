"""Running one shell command at a time, so that a signal at any moment stops it and all processes that it started."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

STOP_SECONDS = 5.0
"""Most seconds that a command may take to end after SIGTERM."""
LOOK_SECONDS = 0.02


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Turns Ctrl-C, SIGTERM of supervisors and SIGHUP of a closed terminal into `KeyboardInterrupt` for a while.

    A signal that was ignored at the beginning (`nohup`) stays ignored.
    """

    def __init__(self) -> None:
        self._held = False
        self._came = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._came = True
        else:
            raise KeyboardInterrupt

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Handle the signals until the end of the block."""
        numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = [(number, signal.signal(number, self._handle)) for number in numbers]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Run the block, which must be short, to its end before a signal is raised."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if self._came:
                self._came = False
                raise KeyboardInterrupt


def run_command(command: str, payload: bytes, environment: Mapping[bytes, bytes], interrupts: Interrupts) -> int:
    """Run a command as `answer_command` does, with the output of this process; return the exit code."""
    return _run(command, payload, environment, interrupts, None)[0]


def answer_command(
    command: str, payload: bytes, environment: Mapping[bytes, bytes], interrupts: Interrupts
) -> tuple[int, bytes]:
    """Run `command` with the shell, `payload` on its input.

    Return its exit code, or minus the signal that ended it, and its output.

    The command runs in a process group of its own. If this call ends early, the group ends: with SIGTERM, and with
    SIGKILL after `STOP_SECONDS`, or when a second signal arrives.

    Raises:
        OSError: the command could not be started.
        KeyboardInterrupt: a signal came, and the command was stopped.
    """
    return _run(command, payload, environment, interrupts, subprocess.PIPE)


def _run(
    command: str, payload: bytes, environment: Mapping[bytes, bytes], interrupts: Interrupts, output: int | None
) -> tuple[int, bytes]:
    process: subprocess.Popen[bytes] | None = None
    try:
        # Between the fork and the return of Popen a signal would leave a command behind that no variable holds.
        with interrupts.held():
            process = subprocess.Popen(  # noqa: S602  # the shell was asked for; nothing of the record is on its line
                command, shell=True, stdin=subprocess.PIPE, stdout=output, env=environment, process_group=0
            )
        written, _ = process.communicate(payload)
    except BaseException:
        if process is not None:
            _stop(process)
        raise
    return process.returncode, written or b""


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Stop a command and the processes that it started; on return none of them runs."""
    try:
        _send(process.pid, signal.SIGTERM)
        for _ in range(round(STOP_SECONDS / LOOK_SECONDS)):
            if not _is_there(process):
                break
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        pass  # a second signal means: do not wait
    finally:
        _send(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        if process.stdout is not None:
            process.stdout.close()


def _is_there(process: "subprocess.Popen[bytes]") -> bool:
    """Return whether a process of the command's group runs."""
    # An ended process that was not waited for still counts: the shell, and the processes that it left to us if we
    # are the init process of a container.
    if process.poll() is not None:
        with suppress(ChildProcessError):
            while os.waitpid(-process.pid, os.WNOHANG)[0]:
                pass
    return _send(process.pid, 0)


def _send(group: int, number: int) -> bool:
    """Send a signal to a process group; return whether the group had a process."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False
