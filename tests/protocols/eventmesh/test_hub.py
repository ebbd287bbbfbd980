"""The figures that the transports of EventMesh share."""

from pathlib import Path

import grpc

from tests.protocols.eventmesh.test_grpc import Events
from tests.protocols.eventmesh.test_http import Answer, Hook, publish, subscribe
from tests.support.eventmesh import SETTINGS, MeshClient
from tests.support.server import LiveServer, configure
from tests.support.zbus import HttpClient

GONE: Answer = (410, b"", {})


def test_each_client_that_is_sent_an_event_live_is_counted(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path, eventmesh=SETTINGS)) as live, Hook() as hook, Hook(GONE) as refusing:
        addresses, metrics = live.server.addresses, live.server.metrics
        with (
            HttpClient(addresses["eventmesh-http"]) as web,
            MeshClient(addresses["eventmesh-tcp"]).hello() as client,
            grpc.insecure_channel(addresses["eventmesh-grpc"]) as channel,
            Events(channel).stream("g", "all", "BROADCASTING") as stream,
        ):
            client.listen("all", mode="BROADCASTING")
            for one in (hook, refusing):
                subscribe(web, one, "all", "g", "BROADCASTING")
            publish(web, "all", "hear")
            assert (client.push()[1]["body"], stream.text(), hook.next()[0]["content"]) == ("hear", "hear", "hear")
            sample, dropped = metrics.registry.get_sample_value, {"protocol": "eventmesh", "reason": "failed"}
            live.until(lambda: sample("babelbus_live_dropped_total", dropped) == 1)
            live.until(lambda: metrics.live_delivered("eventmesh").records_total == 3)
            assert metrics.live_delivered("eventmesh").bytes_total > 3 * len("hear")
