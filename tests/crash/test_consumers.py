"""Members of an explicit group on a real server, that come, go, break off, fail and ack, until the server is killed.

Nothing is with two of them at once, nothing that was acked comes again, records of one key never overtake each other;
after a SIGKILL none is skipped, and what comes again lies behind the cursors on disk. The seed of a run is in the name
of its test; BABELBUS_TEST_SEED chooses another first one.
"""

import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from babelbus.cli.api import AdminApi
from babelbus.cli.api_http import HttpTransport
from babelbus.cli.command import CommandError
from babelbus.config import Config, GroupsSettings, TopicDefaults
from babelbus.core.groups.cursor_files import GroupFile, StoredGroup
from babelbus.core.record import Record
from babelbus.protocols.jebp.codec import encode_request
from babelbus.protocols.jebp.messages import CreateRecords
from babelbus.records.format import encode_batch
from babelbus.storage.files import LocalFiles
from babelbus.web.token import read_token
from tests.support.bus import NOW, SAFETY_NET_SECONDS
from tests.support.child import Child
from tests.support.jebp import said
from tests.support.server import configure

SEED = int(os.environ.get("BABELBUS_TEST_SEED", "1"))
SEEDS = [*range(SEED, SEED + 2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(SEED + 2, SEED + 30))]
TOPIC = "work"
PARTITIONS = 2
MEMBERS = 4
KEYS = (None, None, b"a", b"b", b"c")
Place = tuple[int, int]
"""Partition and offset."""


def settings(folder: Path) -> Config:
    made = configure(folder, topics=TopicDefaults(ack="written", segment_bytes=2**16), admin=True)
    return msgspec.structs.replace(made, groups=GroupsSettings(commit_seconds=0.02))


class Ledger:
    """Who holds what, and what was acked: shared by all members of one run of the server."""

    def __init__(self, acked: set[Place]) -> None:
        self._changed = threading.Condition()
        self._holders: dict[Place, Member] = {}
        self._keys: dict[bytes, set[Place]] = {}
        """Of each key, those that were handed out and not acked."""
        self._last: dict[Place, Member] = {}
        self.acked = acked
        self.in_doubt: set[Place] = set()
        """Acks that were sent and are not answered."""
        self.count = 0
        self.broken: list[str] = []

    def got(self, member: "Member", place: Place, key: bytes | None) -> None:
        with self._changed:
            if place in self.acked:
                self.broken.append(f"{place} was acked and came again")
            if self._holders.get(place, member) is not member:
                self.broken.append(f"{place} is with two members")
            if key is not None:
                others = self._keys.setdefault(key, set())
                for other in others - self.in_doubt:
                    # What a member has given back it may have had a later one behind.
                    if other[0] == place[0] and other < place and self._last[other] is not member:
                        self.broken.append(f"{place} overtook {other}")
                others.add(place)
            self._holders[place] = self._last[place] = member

    def begin(self, places: Sequence[Place]) -> None:
        """Their ack is sent now; from here on others may get what was behind them."""
        with self._changed:
            self.in_doubt.update(places)

    def done(self, places: Sequence[Place]) -> None:
        with self._changed:
            self.in_doubt.difference_update(places)
            for place in places:
                self._holders.pop(place, None)
                self.acked.add(place)
                for others in self._keys.values():
                    others.discard(place)
            self.count += len(places)
            self._changed.notify_all()

    def returned(self, places: Sequence[Place]) -> None:
        with self._changed:
            for place in places:
                self._holders.pop(place, None)

    def wait_for(self, count: int) -> None:
        with self._changed:
            begun = self.count
            assert self._changed.wait_for(lambda: self.broken or self.count >= begun + count, SAFETY_NET_SECONDS)


class Member(threading.Thread):
    """Consumes over the administration endpoint, leaves or breaks off now and then, and comes again."""

    def __init__(self, api: AdminApi, ledger: Ledger, seed: int) -> None:
        super().__init__(daemon=True)
        self._api, self._ledger, self._chance = api, ledger, random.Random(seed)
        self._held: dict[int, Place] = {}
        self._name = ""

    def run(self) -> None:
        try:
            while True:
                self._be_a_member()
        except CommandError:  # the server was killed
            return

    def _be_a_member(self) -> None:
        window = str(self._chance.choice([1, 5, 40]))
        lines = self._api.lines(f"/api/topics/{TOPIC}/groups/g/consume", {"window": window}, dict[str, Any])
        left = self._chance.randint(1, 30)
        for line in lines:
            if line is None:
                continue
            if "consumer" in line:
                self._name = line["consumer"]
                continue
            self._take(line.get("deliveries", []))
            left -= 1
            if not left or "end" in line:
                break
        # Others may have these from now on, so it is said before they can.
        self._ledger.returned(list(self._held.values()))
        self._held.clear()
        if self._chance.random() < 0.5:
            self._ask("leave", {})
        lines.close()  # type: ignore[attr-defined]  # a generator

    def _take(self, deliveries: list[dict[str, Any]]) -> None:
        for one in deliveries:
            record = one["record"]
            place = (record["partition"], record["offset"])
            key = record.get("key")
            self._held[one["number"]] = place
            self._ledger.got(self, place, None if key is None else key.encode())
        numbers = list(self._held)
        failed = [number for number in numbers if self._chance.random() < 0.05]
        good = [number for number in numbers if number not in failed]
        if failed:
            self._ledger.returned([self._held.pop(number) for number in failed])
            self._ask("nack", {"numbers": failed, "delay_seconds": self._chance.choice([0, 0.01])})
        if good:
            places = [self._held.pop(number) for number in good]
            self._ledger.begin(places)
            answer = self._ask("ack", {"numbers": good})
            if answer["stale"]:
                self._ledger.broken.append(f"{answer['stale']} acks of a live member were stale")
            self._ledger.done(places)

    def _ask(self, what: str, body: object) -> dict[str, Any]:
        content = msgspec.json.encode(body)
        return self._api.ask("POST", f"/api/consumers/{self._name}/{what}", {}, dict[str, Any], content=content)


class Publisher(threading.Thread):
    """Publishes records until the server is gone."""

    def __init__(self, child: Child, seed: int) -> None:
        super().__init__(daemon=True)
        self._caller, self._chance = child.caller(), random.Random(seed)
        self.refused: list[str] = []

    def run(self) -> None:
        try:
            with self._caller:
                while True:
                    count, partition = self._chance.choice([1, 10, 60]), self._chance.randrange(PARTITIONS)
                    records = [Record(b"x", self._chance.choice(KEYS), timestamp=NOW) for _ in range(count)]
                    request = CreateRecords(TOPIC, partition, -1, -1, encode_batch(records).data)
                    (answer,) = self._caller.ask(encode_request(request))
                    if said(answer)[:4] != "a130":
                        self.refused.append(said(answer))
        except OSError:  # the server was killed
            pass


def api_of(child: Child) -> AdminApi:
    return AdminApi(HttpTransport(child.addresses["admin"], "Bearer " + read_token(str(child.folder))))


def stored(folder: Path) -> StoredGroup:
    """The group as it is on disk."""
    (found,) = GroupFile(LocalFiles(), str(folder)).load()[1]
    return found


def covers(group: StoredGroup, place: Place) -> bool:
    """Whether the cursors on disk say that a record is done."""
    cursor = group.cursors[place[0]]
    return place[1] < cursor.committed or any(start <= place[1] < end for start, end in cursor.done)


@pytest.mark.parametrize("seed", SEEDS)
def test_members_that_come_and_go_do_each_record_once_and_a_kill_costs_nothing_but_the_lag(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    acked: set[Place] = set()
    for round_number in range(3):
        with Child(settings(tmp_path)) as child:
            api = api_of(child)
            if round_number == 0:
                api.create_topic(TOPIC, PARTITIONS, {"engine": ("disk", "db")[seed % 2]})
                made = {"ack": "explicit", "attempts_max": None, "retry_seconds": 0.01}
                body = msgspec.json.encode(
                    {"topic": TOPIC, "name": "g", "settings": made, "start": {"at": "beginning"}}
                )
                api.ask("POST", "/api/groups", {}, dict[str, Any], content=body)
            ledger = Ledger(acked)
            publisher = Publisher(child, chance.randrange(2**31))
            members = [Member(api, ledger, chance.randrange(2**31)) for _ in range(MEMBERS)]
            for thread in (publisher, *members):
                thread.start()
            ledger.wait_for(chance.choice([1, 100, 1000]))
            child.kill()
            for thread in (publisher, *members):
                thread.join(SAFETY_NET_SECONDS)
                assert not thread.is_alive()
            assert not publisher.refused
            assert not ledger.broken
        group = stored(tmp_path)
        ahead = {place for place in ledger.in_doubt | acked if covers(group, place)}
        # The cursors are never ahead: whatever they call done was acked, or its ack was under way.
        assert all(
            (cursor, offset) in ahead for cursor, one in group.cursors.items() for offset in range(one.committed)
        )
        acked = ahead
    with Child(settings(tmp_path)) as child:
        api, ledger = api_of(child), Ledger(acked)
        member = Member(api, ledger, seed)
        member.start()
        while api.ask("GET", f"/api/topics/{TOPIC}/groups/g", {}, dict[str, Any])["lag"]:
            assert member.is_alive()
        ends = {one["partition"]: one["high_watermark"] for one in api.topic(TOPIC)["partitions"]}
        child.kill()
        member.join(SAFETY_NET_SECONDS)
        assert not ledger.broken
        everything = {(number, offset) for number, end in ends.items() for offset in range(end)}
        assert acked | ledger.in_doubt == everything  # none was skipped
