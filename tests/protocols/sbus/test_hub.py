"""The part that all clients of sbus share."""

import pytest

from babelbus.config import SbusSettings
from babelbus.core.access import NOBODY
from babelbus.core.receipt import Receipt
from babelbus.core.router import Router
from babelbus.core.settings import InvalidSettingError
from babelbus.errors import BabelbusError
from babelbus.metrics import Metrics
from babelbus.protocols.sbus.hub import Hub
from babelbus.storage.errors import DiskFullError


@pytest.mark.parametrize(
    ("error", "reason"), [(DiskFullError("no room"), "disk"), (InvalidSettingError("no"), "refused")]
)
def test_events_that_are_not_recorded_are_counted_with_a_reason_of_the_short_list(
    error: BabelbusError, reason: str
) -> None:
    metrics = Metrics()
    hub = Hub(Router(), metrics, SbusSettings(), publish=lambda _: Receipt.refused(error), topic_of=lambda _: "plant")
    hub.publish(NOBODY, [])
    sample = metrics.registry.get_sample_value
    assert sample("babelbus_publish_errors_total", {"protocol": "sbus", "reason": reason}) == 1
