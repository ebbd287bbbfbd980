"""The verdicts of many rounds as one table: by fault, and by protocol."""

import statistics
from collections.abc import Sequence

import msgspec

from tests.cluster.checker import Violation

ALL = "all rounds"


class Work(msgspec.Struct, frozen=True):
    """How much was sent, acknowledged and delivered: records, and values of the state."""

    sent: int = 0
    acknowledged: int = 0
    delivered: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.sent + other.sent, self.acknowledged + other.acknowledged, self.delivered + other.delivered
        )  # fmt: skip


class Verdict(msgspec.Struct, frozen=True):
    """The result of one round."""

    round: int
    seed: int
    faults: list[str]
    seconds: float
    counts: dict[str, int]
    work: dict[str, Work]
    """By protocol."""
    violations: list[Violation]
    gaps: dict[str, float] = {}
    """By fault: the longest time without an acknowledgement of any publisher of the log."""
    quiet: dict[str, int] = {}
    """By fault: connections of quiet clients."""
    lived: dict[str, int] = {}
    """By fault: those of them that went on."""


class Row(msgspec.Struct, frozen=True):
    """The rounds with one fault."""

    rounds: int
    good: int
    found: int
    acknowledged: int
    delivered: int
    audited: int
    seconds_p50: float
    seconds_max: float
    gap_seconds_max: float
    quiet: int = 0
    lived: int = 0


class Finding(msgspec.Struct, frozen=True):
    """A broken promise, and the round that shows it."""

    round: int
    faults: list[str]
    promise: str
    words: str


class Summary(msgspec.Struct, frozen=True):
    """The verdict on all rounds."""

    seed: int
    faults: dict[str, Row]
    protocols: dict[str, Work]
    findings: list[Finding]


def summarise(verdicts: Sequence[Verdict]) -> Summary:
    """Return the table of some rounds; a round with two faults is in the rows of both."""
    names = sorted({fault for verdict in verdicts for fault in verdict.faults})
    rows = {name: _row([verdict for verdict in verdicts if name in verdict.faults], [name]) for name in names}
    protocols: dict[str, Work] = {}
    for verdict in verdicts:
        for protocol, work in verdict.work.items():
            protocols[protocol] = protocols.get(protocol, Work()) + work
    findings = [
        Finding(verdict.round, verdict.faults, violation.promise, violation.words)
        for verdict in verdicts
        for violation in verdict.violations
    ]
    return Summary(
        verdicts[0].seed if verdicts else 0,
        {**rows, ALL: _row(verdicts, names)},
        dict(sorted(protocols.items())),
        findings,
    )


def _row(verdicts: Sequence[Verdict], faults: Sequence[str]) -> Row:
    found = sum(bool(verdict.violations) for verdict in verdicts)
    seconds = [verdict.seconds for verdict in verdicts] or [0.0]
    work = [work for verdict in verdicts for work in verdict.work.values()]
    return Row(
        rounds=len(verdicts),
        good=len(verdicts) - found,
        found=found,
        acknowledged=sum(one.acknowledged for one in work),
        delivered=sum(one.delivered for one in work),
        audited=sum(verdict.counts.get("read", 0) for verdict in verdicts),
        seconds_p50=round(statistics.median(seconds), 1),
        seconds_max=max(seconds),
        gap_seconds_max=max((verdict.gaps.get(fault, 0.0) for verdict in verdicts for fault in faults), default=0.0),
        quiet=sum(verdict.quiet.get(fault, 0) for verdict in verdicts for fault in faults),
        lived=sum(verdict.lived.get(fault, 0) for verdict in verdicts for fault in faults),
    )


def render(summary: Summary) -> str:
    """Return the table as text."""
    wide = max(map(len, [*summary.faults, *summary.protocols]))
    lines = [
        f"seed {summary.seed}",
        "",
        f"{'fault':<{wide}}  rounds   good  found  acknowledged  delivered    audited  p50 s  longest s  longest gap s"
        "  quiet  lived",
    ]
    for fault, row in summary.faults.items():
        lines.append(
            f"{fault:<{wide}} {row.rounds:7} {row.good:6} {row.found:6} {row.acknowledged:13} {row.delivered:10} "
            f"{row.audited:10} {row.seconds_p50:6.1f} {row.seconds_max:10.1f} {row.gap_seconds_max:14.2f} "
            f"{row.quiet:6} {row.lived:6}"
        )
    lines += ["", f"{'protocol':<{wide}}        sent  acknowledged  delivered"]
    for protocol, work in summary.protocols.items():
        lines.append(f"{protocol:<{wide}} {work.sent:11} {work.acknowledged:13} {work.delivered:10}")
    for finding in summary.findings:
        lines += ["", f"round {finding.round} ({', '.join(finding.faults)}): {finding.promise}: {finding.words}"]
    return "\n".join(lines) + "\n"
