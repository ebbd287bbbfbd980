"""The Python processes that run parts of a Spark task: found below a JVM's process, told apart by their connections."""

import os
from contextlib import suppress
from pathlib import Path

from tests.spark.daemons import children, command_of, family

ESTABLISHED = "01"


def daemons(pid: int) -> list[int]:
    """Give the processes below `pid` that Spark starts its workers from: those of tasks, not of planning."""
    found = [one for one in family(pid) if command_of(one)[1:4] == ["-m", "pyspark.daemon", "pyspark.worker"]]
    return [one for one in found if not any(one in children(other) for other in found)]


def workers(pid: int) -> list[int]:
    """Give the workers of tasks below `pid`, idle ones too."""
    return [worker for daemon in daemons(pid) for worker in children(daemon)]


def is_connected(pid: int, port: int) -> bool:
    """Say whether a process has a connection to a port of this machine."""
    sockets = set()
    try:
        for line in Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == ESTABLISHED and int(fields[2].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # it was closed meanwhile
                if os.readlink(f"/proc/{pid}/fd/{name}") in sockets:
                    return True
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        pass
    return False
