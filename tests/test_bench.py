"""The benchmark's own rules: when a figure holds, and what mixed traffic is."""

import itertools

import pytest

from bench import frame, traffic


@pytest.mark.parametrize(
    ("value", "failures"),
    [(100, []), (99, ["floor 100"]), (60, ["floor 100"]), (59, ["floor 100", "0.6 of bench.test_twin"])],
)
def test_a_figure_holds_at_its_floor_and_its_ratio_to_the_uniform_twin(
    monkeypatch: pytest.MonkeyPatch, value: float, failures: list[str]
) -> None:
    twin = frame.Figure("bench.test_twin", "msgs/s", lambda: 100.0)
    monkeypatch.setitem(frame.FIGURES, twin.name, twin)
    mixed = frame.Figure("bench.test_mixed", "msgs/s", lambda: value, floor=100, uniform=twin.name)
    result = frame.run(mixed, repeat=3, progress=lambda _: None)
    assert (result.uniform_value, result.failures) == (100, failures)


def test_a_figure_without_a_floor_holds() -> None:
    result = frame.run(frame.Figure("bench.test", "msgs/s", lambda: 1.0), repeat=1, progress=lambda _: None)
    assert result.failures == []


def test_mixed_traffic_is_the_same_each_time_and_no_two_neighbours_are_alike() -> None:
    messages = traffic.messages(2_000)
    assert messages == traffic.messages(2_000)
    assert messages != traffic.messages(2_000, seed=1)
    assert {message.topic for message in messages} == set(traffic.topics())
    assert all(15 <= len(message.payload) <= 2_100 for message in messages)
    assert all(one != other for one, other in itertools.pairwise(messages))


def test_uniform_traffic_is_one_message_many_times() -> None:
    assert len(set(map(repr, traffic.messages(100, uniform=True)))) == 1
