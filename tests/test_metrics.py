from prometheus_client import generate_latest

from babelbus.metrics import Metrics


def shown(metrics: Metrics) -> str:
    return generate_latest(metrics.registry).decode()


def test_a_chunk_is_counted_under_its_protocol_and_topic() -> None:
    metrics = Metrics()
    published = metrics.topic_published("jebp", "a/b")
    published.inc(1000, 139_000)
    published.inc(1, 39)
    metrics.topic_fetched("jebp", "a/b").inc(2, 78)
    assert 'babelbus_records_published_total{protocol="jebp",topic="a/b"} 1001.0' in shown(metrics)
    assert 'babelbus_bytes_published_total{protocol="jebp",topic="a/b"} 139039.0' in shown(metrics)
    assert 'babelbus_records_fetched_total{protocol="jebp",topic="a/b"} 2.0' in shown(metrics)
    assert 'babelbus_bytes_fetched_total{protocol="jebp",topic="a/b"} 78.0' in shown(metrics)


def test_a_topics_gauges_are_asked_for_when_they_are_read() -> None:
    metrics, sizes = Metrics(), [3.0]
    metrics.segments.read = lambda: [("a", 2.0)]
    metrics.log_bytes.read = lambda: [("a", sizes[-1])]
    sizes.append(5.0)
    assert 'babelbus_log_bytes{topic="a"} 5.0' in shown(metrics)
    assert 'babelbus_segments{topic="a"} 2.0' in shown(metrics)


def test_what_groups_count_by_themselves_is_shown_as_it_is_when_it_is_read() -> None:
    metrics, totals = Metrics(), {"delivered": 5, "commit_failures": 0}
    metrics.watch_groups(lambda: totals)
    assert "babelbus_groups_delivered_total 5.0" in shown(metrics)
    totals["delivered"] = 7
    assert "babelbus_groups_delivered_total 7.0" in shown(metrics)
    assert "babelbus_groups_commit_failures_total 0.0" in shown(metrics)


def test_a_removed_topic_is_shown_no_more_and_others_are() -> None:
    metrics = Metrics()
    for topic in ("a", "b"):
        metrics.topic_published("jebp", topic).inc(1, 1)
        metrics.topic_fetched("jebp", topic).inc(1, 1)
    metrics.forget_topic("a")
    assert 'topic="a"' not in shown(metrics)
    assert 'topic="b"' in shown(metrics)


def test_two_servers_in_one_process_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.flush_failures_total.inc()
    assert "babelbus_flush_failures_total 1.0" in shown(one)
    assert "babelbus_flush_failures_total 0.0" in shown(other)


def test_every_metric_that_is_shown_is_described() -> None:
    metrics = Metrics()
    families = {family.name for family in metrics.registry.collect() if family.name.startswith("babelbus_")}
    assert {info.name.removesuffix("_total") for info in metrics.describe()} == families
