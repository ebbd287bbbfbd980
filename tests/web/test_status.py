"""The figures of a server at one moment."""

from tests.web.test_admin import Caller, FakeServer, serve


def test_topics_groups_health_and_counts_are_shown() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        await call("POST", "/api/topics", {"name": "orders", "partitions": 2})
        await call("POST", "/api/groups", {"topic": "orders", "name": "workers"})
        await call("POST", "/api/send", {"subject": "orders", "payload": "x"})
        call.api.metrics.topic_published("zbus", "orders").inc(3, 30)
        call.api.metrics.connections.labels("zbus").set(2)
        status, shown = await call("GET", "/api/status")
        assert status == 200
        assert (shown["health"], shown["reasons"], shown["enforcing"]) == ("ok", [], False)
        topics = {topic["name"]: topic for topic in shown["topics"]}
        assert (topics["orders"]["records"], topics["orders"]["partitions"]) == (1, 2)
        assert (topics["orders"]["published"], topics["orders"]["published_bytes"]) == (4, 31)
        (group,) = shown["groups"]
        assert (group["topic"], group["name"], group["lag"], group["members"]) == ("orders", "workers", 1, 0)
        (zbus,) = [one for one in shown["protocols"] if one["protocol"] == "zbus"]
        assert (zbus["published"], zbus["connections"]) == (3, 2)
        bus.stopping = True
        assert (await call("GET", "/api/status"))[1]["reasons"] == ["the server stops"]

    serve(test)
