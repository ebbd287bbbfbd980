"""The public client: publish to the bus and read from it.

    from babelbus.client import BlockingClient, Identity

    with BlockingClient(identity=Identity.load("data/conf/admin_key")) as client:
        client.publish("plant", b"21.5")

`Client` is the same for asyncio. Every error is a `BabelbusError`; connection and server errors are `ClientError`s.
"""

from babelbus.clients import jebp
from babelbus.clients.jebp import *  # noqa: F403 - the face of the client is the public one

__all__: list[str] = []
__all__ += jebp.__all__
