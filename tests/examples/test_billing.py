"""The example of a service, as a process of its own beside a server."""

import signal
import subprocess
import sys
from pathlib import Path

from babelbus.client import NoRespondersError, Reply
from babelbus.testing import Server

PROGRAM = Path(__file__).parents[2] / "examples" / "billing.py"


def test_the_service_bills_answers_and_ends_with_sigterm() -> None:
    with Server() as server, server.blocking_client() as client:
        client.create_topic("orders")
        command = [sys.executable, str(PROGRAM), server.address, str(server.folder / "conf" / "admin_key")]
        with client.subscribe("bills/+") as bills:
            service = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            try:
                client.publish_many("orders", [b'{"customer": 7, "price": 12}', b'{"customer": 8, "price": 30}'])
                assert {next(bills).subject for _ in range(2)} == {"bills/7", "bills/8"}
                reply: Reply | None = None
                while reply is None:
                    try:
                        reply = client.request("billing/total")
                    except NoRespondersError:
                        continue
                assert reply.payload == b"42"
                service.send_signal(signal.SIGTERM)
                assert service.wait(60) == 0
            finally:
                service.kill()
                _, told = service.communicate()
        assert "billed order 0, attempt 1" in told
        consumer = client.consume("orders", "billing")
        assert consumer.next(timeout=0.2) is None  # the service has acked both
