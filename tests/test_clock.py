from babelbus.clock import SystemClock
from tests.support.clock import ManualClock


def test_the_system_clock_tells_milliseconds_and_grows() -> None:
    clock = SystemClock()
    first = clock.monotonic()
    assert clock.now_ms() > 1_700_000_000_000
    assert clock.monotonic() >= first


def test_a_manual_clock_stands_still_until_it_is_told_to_go_on() -> None:
    clock = ManualClock(1000)
    assert (clock.now_ms(), clock.monotonic()) == (1000, 0.0)
    clock.advance(1.5)
    assert (clock.now_ms(), clock.monotonic()) == (2500, 1.5)


def test_a_jump_of_the_wall_clock_moves_no_deadline() -> None:
    clock = ManualClock(10_000)
    clock.jump_to(1)
    assert (clock.now_ms(), clock.monotonic()) == (1, 0.0)
