"""`babelbus bench`: the speed of the running server from here: publish to a topic of its own, read back, remove it."""

import secrets
import time
from typing import TYPE_CHECKING

import click

from babelbus.cli.command import BusCommand, CommandError, examples
from babelbus.cli.output import Advance, human_bytes, note, plural, print_json, print_table, progress
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options

if TYPE_CHECKING:
    from babelbus.client import BlockingClient

BATCH_RECORDS = 1_000
CALL_RECORDS = 100_000
"""Records of one call: the client has several of its batches under way, and only these records in memory."""


@click.command(cls=BusCommand, epilog=examples("babelbus bench", "babelbus bench --records 1000000 --size 1000 --json"))
@click.option("--records", type=click.IntRange(1), default=200_000, show_default=True, help="Records to publish.")
@click.option("--size", type=click.IntRange(0, 2**20), default=100, show_default=True, help="Bytes of each payload.")
@click.option(
    "--single", type=click.IntRange(0), default=500, show_default=True, help="Records to publish one at a time."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@bus_options
def bench(target: Target, records: int, size: int, single: int, as_json: bool) -> None:
    """Measure the running server: publish records to a topic made for it, read them back, remove the topic.

    Publishing goes in batches of 1,000 (command 13), several on the way, each acknowledged at the server's default
    ack level; then some records one at a time. Reading checks every record. Needs administrative rights.
    """
    topic = f"bench-{secrets.token_hex(6)}"
    with target.connect() as client:
        client.create_topic(topic)
        try:
            with progress("bench", 2 * records + single, "records", quiet=as_json) as advance:
                result = _measure(client, topic, records, size, single, advance)
        finally:
            client.remove_topic(topic)
    if as_json:
        print_json(result)
        return
    note(f"{plural(records, 'record')} of {size:,} bytes, batches of {BATCH_RECORDS:,}, one connection")
    rows = [
        ("publish", f"{result['publish_per_second']:,.0f}/s", f"{human_bytes(result['publish_per_second'] * size)}/s"),
        ("read", f"{result['read_per_second']:,.0f}/s", f"{human_bytes(result['read_per_second'] * size)}/s"),
    ]
    if single:
        rows += [
            ("publish, one at a time", f"{result['single_per_second']:,.0f}/s", ""),
            ("  median", f"{result['single_p50_ms']:.2f} ms", ""),
            ("  99th percentile", f"{result['single_p99_ms']:.2f} ms", ""),
        ]
    print_table(("Figure", "Records", "Payload"), rows, numbers=("Records", "Payload"))


def _measure(
    client: "BlockingClient", topic: str, records: int, size: int, single: int, advance: Advance
) -> dict[str, float]:
    payload = bytes(i & 0xFF for i in range(size))
    result: dict[str, float] = {"records": records, "size": size}
    start = time.perf_counter()
    for at in range(0, records, CALL_RECORDS):
        client.publish_many(topic, [payload] * min(CALL_RECORDS, records - at), batch_records=BATCH_RECORDS)
        advance(min(CALL_RECORDS, records - at))
    result["publish_per_second"] = records / (time.perf_counter() - start)
    latencies = []
    for _ in range(single):
        begun = time.perf_counter()
        client.publish(topic, payload)
        latencies.append(time.perf_counter() - begun)
    if latencies:
        latencies.sort()
        result["single_per_second"] = single / sum(latencies)
        result["single_p50_ms"] = 1000 * latencies[single // 2]
        result["single_p99_ms"] = 1000 * latencies[min(single * 99 // 100, single - 1)]
    per_second = _read(client, topic, records + single, advance)
    result["read_per_second"] = per_second
    return result


def _read(client: "BlockingClient", topic: str, expected: int, advance: Advance) -> float:
    """Read every partition back; return records a second."""
    start, count, partition = time.perf_counter(), 0, 0
    while count < expected:
        before = count
        for batch in client.follow_batches(topic, partition=partition, until_end=True):
            batch.verify()
            count += len(batch)
            advance(len(batch))
        partition += 1
        if count == before and partition > 1024:
            raise CommandError(f"{expected:,} records were published and acknowledged, but only {count:,} can be read")
    return count / (time.perf_counter() - start)
