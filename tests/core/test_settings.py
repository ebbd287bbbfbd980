"""A topic's settings: what is refused names what is wrong."""

import pytest

from babelbus.core.settings import InvalidSettingError, TopicSettings, change_settings

DEFAULTS = TopicSettings()


def test_what_is_not_said_comes_from_the_defaults() -> None:
    made = change_settings(TopicSettings(ack="written", retention_bytes=5), {"cleanup": "compact"})
    assert made == TopicSettings(ack="written", retention_bytes=5, cleanup="compact")


def test_none_takes_a_bound_away() -> None:
    assert change_settings(TopicSettings(retention_seconds=3.0), {"retention_seconds": None}).retention_seconds is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"colour": "red"}, "colour"),
        ({"ack": "soon"}, "ack"),
        ({"engine": "tape"}, "engine"),
        ({"cleanup": 1}, "cleanup"),
        ({"retention_seconds": 0}, "retention_seconds"),
        ({"retention_bytes": -1}, "retention_bytes"),
        ({"retention_bytes": "many"}, "retention_bytes"),
        ({"segment_seconds": -0.5}, "segment_seconds"),
        ({"segment_bytes": 1023}, "segment_bytes"),
        ({"segment_bytes": 2**40 + 1}, "segment_bytes"),
        ({"segment_bytes": None}, "segment_bytes"),
        ({"tombstone_seconds": -1}, "tombstone_seconds"),
        ({"compact_after_seconds": 0}, "compact_after_seconds"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidSettingError, match=named):
        change_settings(DEFAULTS, changes)


@pytest.mark.parametrize("size", [1024, 2**40])
def test_the_limits_of_a_segment_belong_to_it(size: int) -> None:
    assert change_settings(DEFAULTS, {"segment_bytes": size}).segment_bytes == size


def test_the_log_is_told_its_part() -> None:
    settings = TopicSettings(segment_bytes=2048, retention_bytes=7, retention_seconds=8.0, cleanup="compact")
    log = settings.for_log(4096)
    assert (log.segment_bytes, log.retention_bytes, log.retention_seconds, log.cleanup, log.checkpoint_bytes) == (
        2048, 7, 8.0, "compact", 4096,
    )  # fmt: skip
