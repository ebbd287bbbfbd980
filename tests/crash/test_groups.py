"""SIGKILL under a group in explicit mode: nothing is skipped, and what a commit covered does not come again.

The child below runs the core alone, on real files, and writes what it does to its standard output; the seed of a run is
in the name of its test, BABELBUS_TEST_SEED chooses another first one.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from babelbus.clock import SystemClock
from babelbus.core.access import SERVER
from babelbus.core.broker import Broker
from babelbus.core.groups.in_flight import Delivery
from babelbus.core.groups.member import Member
from babelbus.core.groups.registry import Groups
from babelbus.core.groups.settings import BEGINNING, GroupSettings
from babelbus.core.record import Event
from babelbus.core.settings import TopicSettings
from babelbus.metrics import Metrics
from babelbus.storage.disk.store import FolderStore
from babelbus.storage.files import LocalFiles
from tests.support.bus import SAFETY_NET_SECONDS, publish

ROOT = Path(__file__).parent.parent.parent
SEED = int(os.environ.get("BABELBUS_TEST_SEED", "1"))
SEEDS = [SEED, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(SEED + 1, SEED + 40))]
RECORDS = 1500


class Run:
    """What one run of the child said until it was killed or done."""

    def __init__(self, folder: Path, seed: int, lines_max: int) -> None:
        self.acked: list[int] = []
        self.covered = 0
        """So many of `acked` were acked before the last commit that returned."""
        self.done = False
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.test_groups", str(folder), str(seed)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for number, line in enumerate(process.stdout):
            if number == lines_max:
                process.kill()  # what it has written still comes
            word, _, rest = line.strip().partition(" ")
            if word == "ack":
                self.acked += map(int, rest.split())
            elif word == "commit":
                self.covered = int(rest)
            elif word == "done":
                self.done = True
        code = process.wait(SAFETY_NET_SECONDS)
        process.stdout.close()
        assert code in (0, -signal.SIGKILL), "the child failed by itself"


@pytest.mark.parametrize("seed", SEEDS)
def test_after_kills_no_record_is_skipped_and_none_that_a_commit_covered_comes_again(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    acked: set[int] = set()
    covered: set[int] = set()
    kills = 0
    while True:
        run = Run(tmp_path, chance.randrange(2**31), chance.randint(5, 120) if kills < 5 else 2**31)
        assert not covered & set(run.acked)
        assert len(set(run.acked)) == len(run.acked)
        acked |= set(run.acked)
        covered |= set(run.acked[: run.covered])
        if run.done:
            break
        kills += 1
        assert kills < 10
    assert kills
    assert acked == set(range(RECORDS))


async def work(folder: str, seed: int) -> None:
    """Be the child: publish what is missing, let members ack in any order and fail, and say what was acked."""
    chance = random.Random(seed)
    loop, clock, files = asyncio.get_running_loop(), SystemClock(), LocalFiles()
    store = FolderStore(files, folder, clock)
    broker = Broker(
        {"disk": store},
        defaults=TopicSettings(ack="written", segment_bytes=2**14),
        checkpoint_bytes=2**20,
        clock=clock,
        metrics=Metrics(),
        loop=loop,
    )
    broker.open()
    topic = broker.find_topic("work") or await broker.create_topic("work", 2, principal=SERVER)
    groups = Groups(broker, files, folder, clock=clock, loop=loop, commit_seconds=0.02)
    groups.open()
    settings = GroupSettings(ack="explicit", attempts_max=None, retry_seconds=0.001)
    group = groups.ensure("work", "g", settings, start=BEGINNING, principal=SERVER)
    count = 0
    members: list[Member] = []

    def say(*words: object) -> None:
        os.write(1, (" ".join(map(str, words)) + "\n").encode())

    def receive(at: int, deliveries: Sequence[Delivery]) -> None:
        loop.call_soon(handle, members[at], list(deliveries))

    def handle(member: Member, deliveries: list[Delivery]) -> None:
        nonlocal count
        if member.closed:
            return
        chance.shuffle(deliveries)
        failed = [one for one in deliveries if chance.random() < 0.1]
        good = [one for one in deliveries if one not in failed]
        member.nack(failed)
        if good:
            assert member.ack(good) == len(good)
            count += len(good)
            say("ack", *[int(one.payload or b"") for one in good])

    def join() -> None:
        at = len(members)
        members.append(
            group.join(lambda deliveries: receive(at, deliveries), window=chance.choice([1, 7, 40]), principal=SERVER)
        )

    join()
    join()
    stored = sum(partition.high_watermark for partition in topic.partitions)
    while stored < RECORDS or group.info().lag:
        for _ in range(min(chance.choice([1, 20]), RECORDS - stored)):
            publish(topic, [Event("work", b"%d" % stored, chance.choice([None, b"a", b"b"]))])
            stored += 1
        if chance.random() < 0.05:
            chance.choice(group.members).leave()
            join()
        if chance.random() < 0.2:
            before = count
            await groups.commit()
            say("commit", before)
        await asyncio.sleep(0)
    await groups.close()
    await broker.close()
    say("done")


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], int(sys.argv[2])))
