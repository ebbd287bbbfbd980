"""A round of the torture in which a client did nothing is no good round."""

import random
from typing import Any

import pytest

pytest.importorskip("nats", reason="the cluster is not tested: the package nats-py is not installed")

from tests.cluster.checker import check
from tests.cluster.history import History
from tests.cluster.rounds import note_idle
from tests.cluster.workload import Listener

NO_CLUSTER: Any = None


def test_a_client_that_did_nothing_breaks_a_round() -> None:
    history = History()
    idle, busy = (Listener(name, "plant", NO_CLUSTER, history, random.Random(1)) for name in ("idle", "busy"))
    busy.got("value")
    note_idle([idle, busy], history)
    (violation,) = check(history.events())
    assert violation.promise == "stuck"
    assert [event.who for event in violation.events] == ["idle"]
