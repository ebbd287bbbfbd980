"""The machine that the figures come from: without it a number says nothing."""

import os
import platform
import tempfile
import time

from bench.workload import scratch_root


def describe() -> str:
    """Two lines: processor, cores, Python and kernel; the disk that the measurements write to."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return (
        f"{_processor()}, {os.cpu_count()} cores, {python}, {platform.system()} {platform.release()}\n"
        f"files on {_file_system(scratch_root())}, fdatasync of 4 KiB {_fdatasync_seconds() * 1000:.2f} ms"
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):  # no Linux, or a processor that has no such line
        return platform.processor() or platform.machine()


def _file_system(path: str) -> str:
    # On a tmpfs a flush costs nothing and every `flushed` figure is a fairy tale, so the type is told.
    try:
        with open("/proc/mounts", encoding="utf-8") as file:
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return "an unknown file system"
    real = os.path.realpath(path)
    around = [mount for mount in mounts if os.path.commonpath([mount[0], real]) == mount[0]]
    return max(around, key=lambda mount: len(mount[0]))[1] if around else "an unknown file system"


def _fdatasync_seconds(rounds: int = 50) -> float:
    with tempfile.TemporaryFile(dir=scratch_root(), buffering=0) as file:
        taken = []
        for _ in range(rounds):
            file.write(b"\0" * 4096)
            start = time.perf_counter()
            os.fdatasync(file.fileno())
            taken.append(time.perf_counter() - start)
    return sorted(taken)[rounds // 2]
