"""What every figure and every peer shares: the payload, the time a measurement takes, where files go, latencies."""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

PAYLOAD = b"0123456789" * 10  # 100 bytes; text, because redis-benchmark takes it as an argument
SECONDS = 1.5  # how long one measurement publishes or reads
CLIENTS = 50


@contextmanager
def scratch_folder() -> Iterator[str]:
    """An empty folder for one measurement, removed afterwards. BENCH_DIR says on which disk (default: TMPDIR)."""
    with tempfile.TemporaryDirectory(prefix="babelbus-bench-", dir=scratch_root()) as folder:
        yield folder


def scratch_root() -> str:
    return os.environ.get("BENCH_DIR") or tempfile.gettempdir()


def free_port() -> int:
    """A loopback TCP port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def server_process(command: Sequence[str], port: int, log_path: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server from when it accepts on the loopback `port` until the block ends, however it ends.

    Raises:
        RuntimeError: it ended, or did not listen within a minute; the message carries the end of its log.
    """
    with open(log_path, "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_until_it_listens(process, port, log_path)
        yield process
    finally:
        process.kill()  # its data is thrown away: nothing is gained by a graceful stop
        process.wait()


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int, log_path: str) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.01)
        else:
            return
    with open(log_path, "rb") as log:
        raise RuntimeError(f"{process.args!r} does not listen: {log.read()[-2000:].decode(errors='replace')}")


def latency_note(seconds: Sequence[float]) -> str:
    """`p50 0.10 ms, p99 0.40 ms` of the latencies of single requests."""
    ordered = sorted(seconds)
    p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.50, 0.99))
    return f"p50 {p50 * 1000:.2f} ms, p99 {p99 * 1000:.2f} ms"
