"""Quotas of principals, with a clock that the test moves."""

import pytest

from babelbus.clock import ManualClock
from babelbus.config import QuotaSettings
from babelbus.core.quotas import Bucket, QuotaExceededError, Quotas
from babelbus.metrics import Metrics


def make(settings: QuotaSettings | None = None) -> tuple[Quotas, ManualClock]:
    clock = ManualClock()
    return Quotas(settings or QuotaSettings(), clock, Metrics()), clock


def test_a_bucket_passes_a_second_at_once_and_then_makes_wait_for_its_debt() -> None:
    clock = ManualClock()
    bucket = Bucket(clock, 100)
    assert bucket.take(100) == 0
    assert bucket.take(50) == pytest.approx(0.5)
    clock.advance(0.25)
    assert bucket.take(0) == pytest.approx(0.25)
    clock.advance(0.25)
    assert bucket.take(0) == 0
    clock.advance(1000)
    assert bucket.take(101) == pytest.approx(0.01)  # no more than a second is saved up


def test_without_a_rate_nothing_is_counted() -> None:
    assert Bucket(ManualClock(), None).take(2**60) == 0


def test_connections_of_a_principal_share_its_quota_and_others_have_their_own() -> None:
    quotas, _ = make(QuotaSettings(publish_bytes_per_second=100, connections=2))
    first, second, other = quotas.enter("alice"), quotas.enter("alice"), quotas.enter("bob")
    assert first is second
    first.publish.take(100)
    assert second.publish.take(1) > 0
    assert other.publish.take(1) == 0
    with pytest.raises(QuotaExceededError, match="2 connections of 'alice'"):
        quotas.enter("alice")
    quotas.leave(first)
    quotas.enter("alice")
    assert quotas.describe() == {"alice": {"connections": 2}, "bob": {"connections": 1}}


def test_a_debt_outlives_the_connection() -> None:
    quotas, clock = make(QuotaSettings(publish_bytes_per_second=100))
    quota = quotas.enter("alice")
    quota.publish.take(300)
    quotas.leave(quota)
    assert quotas.enter("alice") is quota
    quotas.leave(quota)
    clock.advance(60)
    quotas.leave(quotas.enter("bob"))
    assert quotas.describe() == {}


def test_limits_of_one_principal_replace_the_defaults_and_hold_at_once() -> None:
    quotas, _ = make()
    assert quotas.active is False
    quota = quotas.enter("alice")
    quotas.set_limits({"alice": QuotaSettings(publish_bytes_per_second=10, connections=1)})
    assert bool(quotas.active)
    assert quota.publish.take(20) == pytest.approx(1)
    with pytest.raises(QuotaExceededError):
        quotas.enter("alice")
    quotas.enter("bob")
    quotas.set_limits({})
    assert not bool(quotas.active)
    assert quota.publish.take(2**40) == 0
