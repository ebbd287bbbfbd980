"""A service as it runs for weeks: bills orders as a member of a group, and answers requests for quotes.

    babelbus topics create orders
    python examples/billing.py 127.0.0.1:5320 data/conf/admin_key
    babelbus publish orders '{"customer": 7, "price": 12}'
    babelbus request billing/total ''

Ctrl-C and SIGTERM let the orders at hand end; all others go to another process of this program, if there is one.
"""

import asyncio
import json
import logging
import sys

from babelbus import Client, Identity, Message
from babelbus.client import Question

log = logging.getLogger("billing")


def make_service(address: str, key_file: str) -> Client:
    """Return a client whose `run` is the service."""
    client = Client(address, identity=Identity.load(key_file))
    totals: dict[int, float] = {}

    @client.subscriber("orders", group="billing", concurrency=4, start="beginning", settings={"attempts_max": 3})
    async def bill(message: Message) -> None:
        order = json.loads(message.payload or b"")  # what is no JSON is a dead letter after three attempts
        totals[order["customer"]] = totals.get(order["customer"], 0) + order["price"]
        await client.emit(f"bills/{order['customer']}", json.dumps(order).encode())
        log.info("billed order %d, attempt %d", message.offset, message.attempt)

    @client.responder("billing/total")
    async def total(question: Question) -> bytes:
        return json.dumps(sum(totals.values())).encode()

    return client


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    asyncio.run(make_service(*sys.argv[1:3]).run())
