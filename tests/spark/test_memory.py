"""The long form: Spark's Python processes need no more memory for the fiftieth million records than for the tenth."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from babelbus.client import BlockingClient
from babelbus.config import TopicDefaults
from babelbus.records.format import encode_payloads
from tests.spark.daemons import command_of, family
from tests.spark.support import NOW, Folder
from tests.support.child import Child
from tests.support.server import configure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

RECORDS = int(os.environ.get("BABELBUS_TEST_MEMORY_RECORDS", "50000000"))
PARTITIONS = 10
BATCH_RECORDS = 10_000
PAYLOAD = b"0123456789" * 10
TRIGGERS = 50
SAMPLE_SECONDS = 1
GROWTH_BYTES_MAX = 32 * 2**20
TOPIC = "numbers"


def fill(folder: Folder) -> None:
    """Write the records of one partition; the others are the same files under other names."""
    log = folder.log(TOPIC)
    while (base := log.next_offset) < RECORDS // PARTITIONS:
        payloads = [b"%010d" % offset + PAYLOAD[10:] for offset in range(base, base + BATCH_RECORDS)]
        log.append(encode_payloads(payloads, [NOW] * BATCH_RECORDS, base))
    log.flush()
    folder.close()
    first = folder.path / "topics" / TOPIC / "0"
    for number in range(1, PARTITIONS):
        other = first.with_name(str(number))
        other.mkdir()
        for path in first.iterdir():
            os.link(path, other / path.name)


def python_workers() -> list[int]:
    """Give the resident bytes of each of Spark's Python processes below this one."""
    found = []
    for pid in family(os.getpid())[1:]:
        if " ".join(command_of(pid)[1:3]).startswith("-m pyspark."):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                found.append(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    return found


def watch(query: StreamingQuery) -> list[tuple[int, int]]:
    """Let a query run to its end; give again and again how many records were read, and the largest worker's bytes."""
    samples: list[tuple[int, int]] = []
    rows: dict[int, int] = {}
    while not query.awaitTermination(SAMPLE_SECONDS):
        for progress in query.recentProgress:
            rows[progress["batchId"]] = progress["numInputRows"]
        samples.append((sum(rows.values()), max(python_workers(), default=0)))
    assert sum(progress["numInputRows"] for progress in query.recentProgress) == RECORDS
    return samples


def check_flat(samples: list[tuple[int, int]]) -> None:
    early = max(size for rows, size in samples if RECORDS * 0.1 <= rows <= RECORDS * 0.3)
    late = max(size for rows, size in samples if rows >= RECORDS * 0.8)
    shown = [f"{rows / 1e6:.0f} M: {size / 2**20:.0f} MiB" for rows, size in samples[:: max(len(samples) // 12, 1)]]
    print("; ".join(shown), f"; early {early / 2**20:.1f}, late {late / 2**20:.1f} MiB")
    assert late - early <= GROWTH_BYTES_MAX, shown


def stream(spark: SparkSession, folder: Folder) -> DataFrame:
    place: dict[str, Any] = {"path": str(folder.path), "subscribe": TOPIC, "startingOffsets": "earliest"}
    source = spark.readStream.format("babelbus").options(**place, maxOffsetsPerTrigger=RECORDS // TRIGGERS)
    return source.load()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_the_memory_of_workers_that_read_stays_flat(spark: SparkSession, folder: Folder, tmp_path: Path) -> None:
    fill(folder)
    writer = stream(spark, folder).writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    check_flat(watch(writer.trigger(availableNow=True).start()))


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_the_memory_of_workers_that_read_and_write_stays_flat(
    spark: SparkSession, folder: Folder, tmp_path: Path
) -> None:
    fill(folder)
    kept = TopicDefaults(segment_bytes=64 * 2**20, retention_bytes=256 * 2**20)
    with (
        Child(configure(tmp_path / "server", topics=kept)) as server,
        BlockingClient(server.address, identity=server.admin) as client,
    ):
        client.create_topic("copy")
        place = {
            "url": f"jebp://{server.address}",
            "identity": str(tmp_path / "server" / "conf" / "admin_key"),
            "topic": "copy",
            "checkpointLocation": str(tmp_path / "checkpoint"),
        }
        rows = stream(spark, folder).select("value", "timestamp")
        query = rows.writeStream.format("babelbus").options(**place).trigger(availableNow=True).start()
        check_flat(watch(query))
        assert client.end_offset("copy") == RECORDS
