"""The floor under storage: the same bytes with bare system calls, without a format, an index or a check."""

import os
import time
from collections.abc import Callable, Iterator

from bench.frame import Peer
from bench.workload import SECONDS, scratch_folder


def writing(make_chunk: Callable[[], bytes], *, records_per_chunk: int, flush: bool = False) -> Peer:
    """Append the chunk again and again with `os.write` (and `os.fdatasync` each time if `flush`), in records/s."""

    def measure() -> float:
        chunk = make_chunk()
        with scratch_folder() as folder, open(os.path.join(folder, "raw"), "wb", buffering=0) as file:
            descriptor, chunks = file.fileno(), 0
            start = time.perf_counter()
            deadline = start + SECONDS
            while time.perf_counter() < deadline:
                _write_all(descriptor, chunk)
                if flush:
                    os.fdatasync(descriptor)
                chunks += 1
            return chunks * records_per_chunk / (time.perf_counter() - start)

    return Peer("os.write + fdatasync" if flush else "os.write", measure)


def reading(
    make_chunk: Callable[[], bytes], *, records_per_chunk: int, chunks: int = 1000, read_bytes: int = 2**20
) -> Peer:
    """Read a file of `chunks` chunks, which is in the page cache, by `read_bytes` at a time, in records/s."""

    def measure() -> Iterator[float]:
        with scratch_folder() as folder:
            path = os.path.join(folder, "raw")
            with open(path, "wb") as file:
                for _ in range(chunks):
                    file.write(make_chunk())
            while True:
                start = time.perf_counter()
                with open(path, "rb", buffering=0) as file:
                    while file.read(read_bytes):
                        pass
                yield chunks * records_per_chunk / (time.perf_counter() - start)

    return Peer("file read", measure)


def _write_all(descriptor: int, chunk: bytes) -> None:
    written = os.write(descriptor, chunk)
    while written < len(chunk):
        written += os.write(descriptor, memoryview(chunk)[written:])
