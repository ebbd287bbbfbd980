"""Kafka in KRaft mode: a server of the jars that Maven fetches for `make bench`, and Kafka's own performance tool.

Equal durability: `flushed` is `log.flush.interval.messages=1` (the server syncs each batch before it acknowledges),
`written` is its default (acknowledged after the write). The tool's JVM starts for each reading; its clock starts with
its first record.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob

from babelbus.errors import BabelbusError
from babelbus.spark.java import java_home
from bench.frame import Peer, PeerMissingError, Reading
from bench.workload import PAYLOAD, free_port, scratch_folder, server_process

TOPIC = "bench"
BATCH_BYTES = 128 * 1024
"""Some thousand records of 100 bytes, as a batch of ours."""
RECORDS, RECORDS_ONE_AT_A_TIME = 2_000_000, 3_000
HEAP = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20")
"""What Kafka's own start script sets."""
CONFIG = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
log.dirs={folder}/logs
num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
{flush}
"""
RATE = re.compile(r" sent, ([\d.]+) records/sec")


def jars(kind: str) -> list[str]:
    """Return the jars of the `server`, or of the connector of `spark`.

    Raises:
        PeerMissingError: they were not fetched.
    """
    found = glob(os.path.join(sys.prefix, "kafka", kind, "*.jar"))
    if not found:
        raise PeerMissingError("Kafka was not fetched: install Maven and a Java, then run make bench")
    return sorted(found)


def _java(*arguments: str) -> list[str]:
    try:
        program = os.path.join(java_home(), "bin", "java")
    except BabelbusError as error:
        raise PeerMissingError(str(error)) from error
    return [program, "-cp", os.path.join(os.path.dirname(jars("server")[0]), "*"), *arguments]


@contextmanager
def server(*, flushed: bool) -> Iterator[str]:
    """Run a server without data, which creates a topic of one partition with its first record; yields its address.

    Raises:
        PeerMissingError: Java or Kafka is not installed.
    """
    with scratch_folder() as folder:
        config, port = os.path.join(folder, "server.properties"), free_port()
        flush = "log.flush.interval.messages=1" if flushed else ""
        with open(config, "w", encoding="ascii") as file:
            file.write(CONFIG.format(controller=free_port(), port=port, folder=folder, flush=flush))
        formatting = _java("kafka.tools.StorageTool", "format", "-t", "babelbus-bench-0000000", "-c", config)
        subprocess.run(formatting, check=True, capture_output=True, timeout=120)
        with server_process(_java(*HEAP, "kafka.Kafka", config), port, os.path.join(folder, "log")):
            yield f"127.0.0.1:{port}"


def publish(address: str, records: int, *options: str) -> Reading:
    """Publish records over one connection, with options of Kafka's producer; return the records a second.

    The tool's latencies are left out: they contain the time that a record waits in the producer's own queue.
    """
    tool = ["org.apache.kafka.tools.ProducerPerformance", "--topic", TOPIC, "--num-records", str(records)]
    tool += ["--record-size", str(len(PAYLOAD)), "--throughput", "-1"]
    tool += ["--producer-props", f"bootstrap.servers={address}", *options]
    ran = subprocess.run(_java(*tool), check=True, capture_output=True, text=True, timeout=600)
    match = RATE.search(ran.stdout.splitlines()[-1])
    assert match is not None, ran.stdout + ran.stderr
    return Reading(float(match[1]))


def _peer(name: str, records: int, *options: str, flushed: bool) -> Peer:
    def measure() -> Iterator[Reading]:
        with server(flushed=flushed) as address:
            publish(address, records, *options)  # a JVM compiles what runs often
            while True:
                yield publish(address, records, *options)

    return Peer(name, measure)


BATCHES = f"batch.size={BATCH_BYTES}"
ONE_AT_A_TIME = ("batch.size=0", "linger.ms=0", "max.in.flight.requests.per.connection=1")

PUBLISH_FLUSHED = _peer("Kafka publish flushed", RECORDS, BATCHES, flushed=True)
PUBLISH_WRITTEN = _peer("Kafka publish written", RECORDS, BATCHES, flushed=False)
ONE_AT_A_TIME_FLUSHED = _peer("Kafka one at a time flushed", RECORDS_ONE_AT_A_TIME, *ONE_AT_A_TIME, flushed=True)

PUBLISHING = (PUBLISH_FLUSHED, PUBLISH_WRITTEN, ONE_AT_A_TIME_FLUSHED)
