"""A webhook of the torture knows which process calls it."""

import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nats", reason="the cluster is not tested: the package nats-py is not installed")

from tests.cluster.over_http import process_of

CALLS_TWICE = """
import os, socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.recv(1)
if len(sys.argv) < 3:
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "again"])
"""


def test_a_connection_is_that_of_the_member_that_has_made_it() -> None:
    own: Any = SimpleNamespace(members=[SimpleNamespace(pid=2**30), SimpleNamespace(pid=os.getpid())])
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        ports = near.getsockname()[1], server.getsockname()[1]
        assert process_of(own, *ports) == process_of(own, *ports)
        gone: Any = SimpleNamespace(members=[])
        assert process_of(gone, *ports) != process_of(gone, *ports)


def test_a_member_that_has_begun_again_is_another_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        numbers = []
        with subprocess.Popen([sys.executable, "-c", CALLS_TWICE, str(port)]) as child:
            members: Any = SimpleNamespace(members=[SimpleNamespace(pid=child.pid)])
            for _ in range(2):
                connection, address = server.accept()
                with connection:
                    numbers.append(process_of(members, address[1], port))
                    connection.sendall(b".")
        assert child.returncode == 0
        assert min(numbers) > 0
        assert numbers[0] != numbers[1]
