"""Spark at a member of a cluster: a job reads and writes by one url, while the data gets other owners."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

pytest.importorskip("nats", reason="clusters are not tested: the package nats-py is not installed")

from tests.support.members import Party, make_topic
from tests.support.nats import NatsServer

pytestmark = pytest.mark.timeout(1200)
BATCH = 50


@pytest.fixture
def party(nats: NatsServer, tmp_path: Path) -> Iterator[Party]:
    party = Party(nats, tmp_path / "members")
    yield party
    party.close()


def test_a_job_goes_on_at_a_member_whose_owner_is_killed_or_moves(
    spark: SparkSession, party: Party, tmp_path: Path
) -> None:
    party.start("a")
    party.start("b")
    make_topic(party, "a")
    make_topic(party, "a", "copy")
    key = party.save_admin(tmp_path / "admin_key")
    place = {"url": party.address("b"), "identity": str(key)}

    def write(rows: DataFrame, number: int) -> None:
        rows.select("value").write.format("babelbus").mode("append").options(
            **place, topic="copy", txnId="copy", batchId=str(number)
        ).save()

    def publish(first: int) -> None:
        party.publish("b", *(b"%d" % number for number in range(first, first + BATCH)))

    source = spark.readStream.format("babelbus").options(**place, subscribe="orders", startingOffsets="earliest")
    query = (
        source.load().writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    )
    try:
        publish(0)
        query.processAllAvailable()
        party.children["a"].kill()  # the owner: b is a member, and comes to own
        party.owner("b", above=1)
        publish(BATCH)
        query.processAllAvailable()
        party.start("a")
        party.move("b", "a")
        publish(2 * BATCH)
        query.processAllAvailable()
        assert query.exception() is None
    finally:
        query.stop()
    expected = [b"%d" % number for number in range(3 * BATCH)]
    assert party.read("b") == expected
    assert party.read("a", "copy") == expected
