"""Guessing: what clients that try secrets cost the others."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.frame import Reading, figure
from bench.workload import scratch_folder
from bench.worterbuch import REQUESTS, Started, connect_tcp, lines_of, pipelined, server, sets

GUESSES_PER_SECOND = 1000
ROUNDS = 3
CONNECTIONS = 100
GUESSER = """
import socket, sys, time
address, rate, count = (sys.argv[1], int(sys.argv[2])), float(sys.argv[3]), int(sys.argv[4])
guess = b"GET /api/topics HTTP/1.1\\r\\nhost: localhost\\r\\nauthorization: Bearer wrong\\r\\n\\r\\n"
connections = [None] * count
attempts, due = 0, time.monotonic()
print("guessing", flush=True)
while True:
    made = connections[attempts % count]
    try:
        if made is not None and not made.recv(65536):
            made.close()
            made = None
        if made is None:
            made = socket.create_connection(address)
            made.setblocking(False)
        made.send(guess)
    except BlockingIOError:
        pass  # the server has not answered the guess of before
    except OSError:
        made.close()
        made = None
    connections[attempts % count] = made
    attempts += 1
    due += 1 / rate
    time.sleep(max(due - time.monotonic(), 0))
"""


@contextmanager
def guesser(started: Started) -> Iterator[None]:
    """Run a process that sends wrong tokens to the administration endpoint."""
    command = [sys.executable, "-c", GUESSER, *map(str, (*started.admin, GUESSES_PER_SECOND, CONNECTIONS))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def processor_seconds(pid: int) -> float:
    """The processor time of a process, by the nanoseconds of its threads: ticks of 10 ms are 4 % of a part."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(one.read_text().split()[0]) for one in threads) / 1e9


@figure("access.guessing", unit="% of the rate", target=90)
def guessing() -> Iterator[Reading]:
    """Sets of a client for each second of the server's processor while another one tries 1,000 wrong tokens a second.

    In parts of the same without guesses; the best of three each, in turns.
    """
    requests = lines_of(sets())
    with scratch_folder() as folder, server(folder) as started, connect_tcp(started) as made:

        def rate() -> float:
            before = processor_seconds(started.pid)
            pipelined(made, requests, REQUESTS, b"\n")
            return REQUESTS / (processor_seconds(started.pid) - before)

        rate()
        while True:
            alone, beside = 0.0, 0.0
            for _ in range(ROUNDS):
                alone = max(alone, rate())
                with guesser(started):
                    beside = max(beside, rate())
            yield Reading(100 * beside / alone, f"{beside:,.0f} of {alone:,.0f} sets for each CPU second")
