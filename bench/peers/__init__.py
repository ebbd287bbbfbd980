"""The others, doing our figures' jobs. Each is a development dependency and is skipped with a message when missing."""

from bench.frame import Figure
from bench.peers import kafka, nats, redis


def alone() -> list[Figure]:
    """Every peer as a figure of its own, for `python -m bench --peers`."""
    jobs = [("records/s", peer) for peer in (*nats.PUBLISHING, *redis.PUBLISHING, *kafka.PUBLISHING)]
    jobs += [("MB/s", peer) for peer in (*nats.READING, *redis.READING)]
    return [Figure(peer.name, unit, peer.measure) for unit, peer in jobs]
