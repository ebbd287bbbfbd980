"""Back-off: who guesses waits, and nobody else does."""

import pytest

from babelbus.identities.guessing import NAME_LENGTH_MAX, Guessing
from babelbus.metrics import Metrics
from tests.support.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_the_wait_doubles_from_one_second_to_sixty(clock: ManualClock) -> None:
    guessing = Guessing(clock, Metrics())
    assert guessing.check("a", "alice") == 0
    waits = []
    for _ in range(9):
        guessing.failed("a", "alice")
        waits.append(guessing.check("a", "alice"))
        clock.advance(waits[-1])
        assert guessing.check("a", "alice") == 0
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_principal_is_not_locked_out_for_other_addresses(clock: ManualClock) -> None:
    guessing = Guessing(clock, Metrics())
    for _ in range(100):
        guessing.failed("10.0.0.1", "alice")
    assert guessing.check("10.0.0.2", "alice") == 0
    assert guessing.check("10.0.0.1", "alice") == 60


def test_an_address_that_guesses_many_principals_waits_for_all_of_them(clock: ManualClock) -> None:
    guessing = Guessing(clock, Metrics())
    waits = []
    for number in range(10):
        guessing.failed("a", f"user {number}")
        waits.append(guessing.check("a", "somebody else"))
    assert waits == [0, 0, 0, 1, 2, 4, 8, 16, 32, 60]


def test_a_success_clears_the_principal_and_not_the_address(clock: ManualClock) -> None:
    guessing = Guessing(clock, Metrics())
    for _ in range(5):
        guessing.failed("a", "alice")
    guessing.succeeded("a", "alice")
    guessing.succeeded("a", "mallory")
    assert guessing.check("a", "alice") == 2  # of the address alone


def test_failures_are_forgotten_ten_minutes_after_the_last(clock: ManualClock) -> None:
    guessing = Guessing(clock, Metrics())
    for _ in range(10):
        guessing.failed("a", "alice")
    clock.advance(600)
    guessing.failed("a", "alice")
    assert guessing.check("a", "alice") == 1


def test_a_wall_clock_that_jumps_changes_no_wait(clock: ManualClock) -> None:
    guessing = Guessing(clock, Metrics())
    guessing.failed("a", "alice")
    clock.jump_to(0)
    assert guessing.check("a", "alice") == 1
    clock.jump_to(2**50)
    assert guessing.check("a", "alice") == 1


def test_no_more_of_a_name_is_kept_than_a_principal_can_have(clock: ManualClock) -> None:
    guessing = Guessing(clock, Metrics())
    long = "a" * 2**20
    guessing.failed("10.0.0.1", long)
    assert all(len(name or "") <= NAME_LENGTH_MAX for _, name in guessing._entries)
    assert guessing.check("10.0.0.1", long) == 1
    guessing.succeeded("10.0.0.1", long)
    assert guessing.check("10.0.0.1", long) == 0


def test_memory_is_bounded_and_the_oldest_goes_first(clock: ManualClock) -> None:
    metrics = Metrics()
    guessing = Guessing(clock, metrics, entries_max=10)
    for number in range(1000):
        guessing.failed(f"10.0.{number >> 8}.{number & 255}", "alice")
    assert metrics.registry.get_sample_value("babelbus_guessing_entries") == 10
    assert guessing.check("10.0.0.0", "alice") == 0
    assert guessing.check("10.0.3.231", "alice") == 1


def test_an_ipv6_network_is_one_address_and_a_mapped_ipv4_address_is_itself(clock: ManualClock) -> None:
    guessing = Guessing(clock, Metrics())
    guessing.failed("2001:db8::1", "alice")
    assert guessing.check("2001:db8::ffff:2", "alice") == 1
    assert guessing.check("2001:db8:0:1::1", "alice") == 0
    guessing.failed("::ffff:10.0.0.1", "alice")
    assert guessing.check("10.0.0.1", "alice") == 1
    guessing.failed("fe80::1%eth0", "alice")
    assert guessing.check("fe80::2%eth0", "alice") == 1
    guessing.failed("no: address", "alice")
    assert guessing.check("no: address", "alice") == 1


def test_an_operator_ends_all_waits(clock: ManualClock) -> None:
    guessing = Guessing(clock, Metrics())
    guessing.failed("a", "alice")
    guessing.clear()
    assert guessing.check("a", "alice") == 0


def test_doors_share_the_entries_and_count_for_themselves(clock: ManualClock) -> None:
    metrics = Metrics()
    guessing = Guessing(clock, metrics)
    zbus, admin = guessing.door("zbus"), guessing.door("admin")
    zbus.failed("a", "alice")
    assert admin.check("a", "alice") == 1
    clock.advance(1)
    assert admin.check("a", "alice") == 0
    admin.succeeded("a", "alice")
    sample = metrics.registry.get_sample_value
    assert sample("babelbus_proofs_failed_total", {"protocol": "zbus"}) == 1
    assert sample("babelbus_proofs_delayed_total", {"protocol": "admin"}) == 1
    assert sample("babelbus_proofs_delayed_total", {"protocol": "zbus"}) == 0
