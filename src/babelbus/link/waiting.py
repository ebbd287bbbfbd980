"""The clients of a member that wait for a core: newcomers, and those whose sessions go on at the next one."""

import asyncio
from collections.abc import Iterator

from babelbus.link.client import Client
from babelbus.link.frames import Copy
from babelbus.listening.crowd import Crowd


class Waiting:
    """Clients that wait, the oldest first, each at most `seconds`.

    At most `newcomers_max` of them have no session, and as many of one address as `crowd` lets in without a proof of
    who they are.
    """

    def __init__(self, newcomers_max: int, seconds: float, crowd: Crowd | None) -> None:
        self.newcomers_max = newcomers_max
        self._seconds, self._crowd = seconds, crowd
        self._clients: dict[Client, str | None] = {}
        """Each with the name that `crowd` counts its address under."""
        self._newcomers = 0

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[Client]:
        """Yield those of now: some may leave meanwhile."""
        return iter(list(self._clients))

    def __contains__(self, client: Client) -> bool:
        return client in self._clients

    def admit(self, client: Client) -> str | None:
        """Add a newcomer; return why it may not wait."""
        if self._newcomers >= self.newcomers_max:
            return f"{self.newcomers_max} clients wait for one"
        peer = client.raw.get_extra_info("peername")
        key = self._crowd.key_of(peer[0]) if self._crowd is not None and isinstance(peer, tuple) else None
        if key is not None and self._crowd is not None:
            refusal = self._crowd.refusal(key)
            if refusal is not None:
                return refusal[1]
            self._crowd.enter(key)
        self._newcomers += 1
        self._add(client, key)
        return None

    def keep(self, client: Client) -> None:
        """Keep a client whose session goes on at the next core."""
        self._add(client, None)

    def _add(self, client: Client, key: str | None) -> None:
        self._clients[client] = key
        client.timer = asyncio.get_running_loop().call_later(self._seconds, self.refuse, client)

    def remove(self, client: Client) -> None:
        """Release the place of a client that waits."""
        key = self._clients.pop(client)
        if not client.continues:
            self._newcomers -= 1
        if key is not None and self._crowd is not None:
            self._crowd.finish_handshake(key)
            self._crowd.leave(key)
        if client.timer is not None:
            client.timer.cancel()

    def refuse(self, client: Client) -> None:
        """Close a client, if it still waits."""
        if client in self._clients:
            self.remove(client)
            client.abort()

    def copies(self) -> list[Copy]:
        """Return the copies of the sessions whose core ended without a word."""
        return [client.copy for client in self._clients if client.copy is not None]

    def drop_copies(self, epoch: int) -> None:
        """Close the clients that wait with a copy of the owner of an epoch: it lives, and has ended their sessions."""
        for client in self:
            if client.copy is not None and client.copy.epoch == epoch:
                self.refuse(client)
