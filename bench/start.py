"""Start-up: the processor time until the command line has answered, and until a server or sbusd can be used.

Processor time and not seconds: a start is the work of one process, and nobody else's work may count. The modules have
been compiled before, as they are after an installation.
"""

import compileall
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import babelbus
from bench.frame import Reading, figure
from bench.workload import scratch_folder

COMMAND = [sys.executable, "-c", "from babelbus.cli import main; main()"]
TICKS = os.sysconf("SC_CLK_TCK")
HELP_MS_MAX = 150
SBUSD_MS_MAX = 250
SERVE_MS_MAX = 600
IDLE_MIB_MAX = 48


def compile_once() -> None:
    compileall.compile_dir(str(Path(babelbus.__file__).parent), quiet=2)


def used_ms(process: "subprocess.Popen[bytes]") -> float:
    """The processor time of a process that runs, to the microsecond where the kernel counts so."""
    try:
        return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0]) / 1e6
    except OSError:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS * 1e3


def resident_mib(process: "subprocess.Popen[bytes]") -> float:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


@contextmanager
def started(*arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A command that says by its output that it is ready: it writes a line there, or closes it."""
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.poll() is None, "it did not start"
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


@figure("start.help_ms", unit="ms", target=HELP_MS_MAX, floor=HELP_MS_MAX, lower_is_better=True)
def help_() -> Iterator[float]:
    """Show the list of all commands."""
    compile_once()
    while True:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*COMMAND, "--help"], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        yield (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3


@figure("start.sbusd_ms", unit="ms", target=SBUSD_MS_MAX, floor=SBUSD_MS_MAX, lower_is_better=True)
def sbusd() -> Iterator[float]:
    """Start a bus without topics."""
    compile_once()
    with scratch_folder() as folder:
        while True:
            with started("sbusd", "-f", "-a", f"{folder}/socket") as process:
                yield used_ms(process)


@figure("start.serve_ms", unit="ms", target=SERVE_MS_MAX, floor=SERVE_MS_MAX, lower_is_better=True)
def serve() -> Iterator[float]:
    """Start a server with all protocols on a folder that has been used."""
    compile_once()
    with scratch_folder() as folder:
        while True:
            with started("serve", "--json", "--server-any-port", "--data-folder", folder) as process:
                yield used_ms(process)


@figure("start.idle_mib", unit="MiB", target=45, floor=IDLE_MIB_MAX, lower_is_better=True)
def idle() -> Iterator[Reading]:
    """The memory of a server that has just started, with all protocols and without clients."""
    compile_once()
    with scratch_folder() as folder:
        while True:
            with started("serve", "--json", "--server-any-port", "--data-folder", folder) as process:
                yield Reading(resident_mib(process), "Python and OpenSSL are a third of it")
