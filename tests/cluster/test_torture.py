"""Traffic of every protocol through three members on three servers of NATS, while one thing after another fails.

The long form is `make torture-cluster`: faults by chance, with verdicts and histories in files.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nats", reason="the cluster is not tested: the package nats-py is not installed")

from tests.cluster.history import write_history
from tests.cluster.rounds import run_round, run_rounds
from tests.support.cluster import BusCluster, bus_cluster
from tests.support.nats import NatsMissingError

LEASE_SECONDS = 3.0
FAULTS = ["kill_member", "kill_owner", "pause_owner", "kill_nats_leader", "stop_owner"]
SEED = 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[BusCluster]:
    try:
        with bus_cluster(lease_seconds=LEASE_SECONDS) as made:
            made.start()
            yield made
    except NatsMissingError as missing:
        pytest.skip(f"the cluster is not tested: {missing}")


# nats-py leaves the socket of an attempt to connect that failed to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_acknowledged_is_lost_copied_reordered_or_stale(
    cluster: BusCluster, tmp_path: Path, fault: str
) -> None:
    verdict, events = run_round(cluster, FAULTS.index(fault), SEED, [fault])
    write_history(tmp_path / "history.jsonl.gz", events)
    assert not verdict.violations, f"{verdict.violations}\nthe history is {tmp_path}/history.jsonl.gz"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 4))
def test_faults_by_chance_break_no_promise(tmp_path: Path, seed: int) -> None:
    try:
        assert run_rounds(tmp_path, seed, 0, 10, lease_seconds=LEASE_SECONDS) == 0
    except NatsMissingError as missing:
        pytest.skip(f"the cluster is not tested: {missing}")
