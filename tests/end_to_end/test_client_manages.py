"""The Python client manages topics, groups and dead letters of a real server."""

import pytest

from babelbus.client import ConflictError, TopicExistsError, UnknownGroupError, UnknownTopicError
from babelbus.testing import Server


def test_topics_groups_and_dead_letters_of_a_real_server() -> None:
    with Server() as server, server.blocking_client() as client:
        made = client.topics.create("orders", partitions=2, settings={"retention_seconds": 3600})
        assert (made.name, len(made.partitions), made.settings["retention_seconds"]) == ("orders", 2, 3600)
        with pytest.raises(TopicExistsError):
            client.topics.create("orders")
        assert client.topics.alter("orders", {"retention_seconds": 60}).settings["retention_seconds"] == 60
        assert "orders" in {topic.name for topic in client.topics.list()}

        client.groups.create("orders", "billing", start="beginning", settings={"attempts_max": 1, "retry_seconds": 0})
        client.publish("orders", b"bad", partition=0)
        consumer = client.consume("orders", "billing")
        next(consumer).nack(reason="broken")
        while not client.groups.show("orders", "billing").counts["dead_lettered"]:
            pass
        consumer.leave()
        assert [one.waiting for one in client.dead_letters.list()] == [1]
        with pytest.raises(ConflictError):
            client.dead_letters.purge("billing")
        replayed = client.dead_letters.replay("billing")
        assert (replayed.replayed, replayed.failed, replayed.waiting) == (1, 0, 0)
        assert client.groups.show("orders", "billing").lag == 1
        client.dead_letters.purge("billing")

        assert client.groups.pause("orders", "billing").paused
        assert not client.groups.resume("orders", "billing").paused
        assert client.groups.seek("orders", "billing", "end").lag == 0
        client.groups.remove("orders", "billing")
        with pytest.raises(UnknownGroupError):
            client.groups.show("orders", "billing")
        client.topics.remove("orders")
        with pytest.raises(UnknownTopicError):
            client.topics.show("orders")
