"""The table of a torture counts what its rounds found."""

from tests.cluster.checker import Violation
from tests.cluster.summary import ALL, Row, Summary, Verdict, Work, render, summarise

GOOD = Verdict(
    0, 7, ["kill_owner"], 10.0, {"read": 4}, {"jebp": Work(3, 2, 1), "zbus": Work(1, 1, 1)}, [], {"kill_owner": 3.5},
    {"kill_owner": 5}, {"kill_owner": 4},
)  # fmt: skip
BAD = Verdict(
    1, 7, ["kill_owner", "cut_nats"], 30.0, {"read": 6}, {"jebp": Work(10, 10, 10)},
    [Violation("lost", "1 x a record")], {"kill_owner": 2.0, "cut_nats": 9.0},
    {"kill_owner": 5, "cut_nats": 5}, {"kill_owner": 5},
)  # fmt: skip


def test_a_round_counts_for_each_of_its_faults() -> None:
    summary = summarise([GOOD, BAD])
    assert summary.faults["kill_owner"] == Row(2, 1, 1, 13, 12, 10, 20.0, 30.0, 3.5, 10, 9)
    assert summary.faults["cut_nats"] == Row(1, 0, 1, 10, 10, 6, 30.0, 30.0, 9.0, 5, 0)
    assert summary.faults[ALL] == Row(2, 1, 1, 13, 12, 10, 20.0, 30.0, 9.0, 15, 9)
    assert summary.protocols == {"jebp": Work(13, 12, 11), "zbus": Work(1, 1, 1)}
    assert [(one.round, one.promise) for one in summary.findings] == [(1, "lost")]


def test_the_table_as_text_has_a_line_for_each_fault_protocol_and_finding() -> None:
    lines = render(summarise([GOOD, BAD])).splitlines()
    for begin in ("kill_owner ", "cut_nats ", f"{ALL} ", "jebp ", "zbus ", "round 1 (kill_owner, cut_nats): lost: "):
        assert len([line for line in lines if line.startswith(begin)]) == 1, begin


def test_a_torture_that_was_ended_before_its_first_round_has_a_table() -> None:
    summary = summarise([])
    assert isinstance(summary, Summary)
    assert summary.faults[ALL].rounds == 0
    assert render(summary)
