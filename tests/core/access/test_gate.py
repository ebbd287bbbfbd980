"""The gate: changes that are whole or nothing, versions, modes, imports, the table file and the audit."""

import asyncio
import errno

import msgspec
import pytest

from babelbus.core.access import (
    ADMIN_RIGHTS,
    SERVER,
    AccessRefusedError,
    Action,
    Credential,
    Effect,
    Identity,
    InvalidAccessError,
    Principal,
    Row,
)
from babelbus.core.access.audit import AuditRecord
from babelbus.core.access.gate import AccessConflictError, Gate
from babelbus.core.access.table import Mode, edits_for, id_of
from babelbus.core.access.table_file import TableFileError, read_table_file
from babelbus.core.topic import Topic
from babelbus.errors import StorageError
from babelbus.records.columns import decode_chunk, iterate
from babelbus.storage.files import FileSystem
from tests.storage.faults import FaultyFiles
from tests.support.bus import Bus, in_loop

BOSS = Identity("admin", "boss", ADMIN_RIGHTS)
ALICE = Principal("alice", ("sensors",), (Credential("token", "t1", {"hash": "very secret"}),))
ROW = Row("role:sensors", "publish", "plant/{name}/#")
LOG = "data/topics/%24access/0/00000000000000000000.log"


async def gate_on(files: FileSystem | None = None) -> tuple[Bus, Gate]:
    bus = Bus(files)
    gate = bus.open_gate("off")
    await gate.settle()
    return bus, gate


def audited(topic: Topic) -> list[AuditRecord]:
    log = topic.partition(0).log
    chunk = log.read(0, 2**20, log.next_offset)
    return [
        msgspec.json.decode(record.payload or b"", type=AuditRecord)
        for record in iterate(decode_chunk(chunk.data, verified=True))
    ]


@in_loop
async def test_a_table_is_there_again_after_a_restart() -> None:
    bus, gate = await gate_on()
    assert await gate.put([ALICE, ROW], BOSS) == 1
    assert await gate.put([Row("alice", "read", "a")], BOSS) == 2
    assert await gate.remove([Row("alice", "read", "a")], BOSS) == 3
    alice = gate.table.principal("alice")
    assert alice is not None
    assert alice == msgspec.structs.replace(ALICE, id=alice.id)
    await bus.broker.close()
    again, gate = await gate_on(bus.files)
    assert gate.table.version == 3
    assert gate.table.principal("alice") == alice
    assert gate.table.rights("alice").may(Action.PUBLISH, "plant/alice/x")
    assert not gate.table.rights("alice").may(Action.READ, "a")
    await again.broker.close()


@in_loop
async def test_damaged_settings_of_its_topic_do_not_turn_the_gate_off() -> None:
    bus, gate = await gate_on()
    await gate.put([ALICE, ROW, Mode(True)], BOSS)
    await bus.broker.close()
    assert isinstance(bus.files, FaultyFiles)
    bus.files.content("data/topics/%24access/settings.json")[20] ^= 1
    again, gate = await gate_on(bus.files)
    assert gate.enforcing
    assert gate.table.rights("alice").may(Action.PUBLISH, "plant/alice/x")
    assert await gate.put([Row("alice", "read", "a")], BOSS) == 2
    await again.broker.close()
    last, gate = await gate_on(bus.files)
    assert gate.table.version == 2
    await last.broker.close()


@in_loop
async def test_a_table_that_lacks_changes_ends_the_start_until_somebody_accepts_it() -> None:
    bus, gate = await gate_on()
    await gate.put([ALICE, Mode(True)], BOSS)
    await gate.put([ROW], BOSS)
    await bus.broker.close()
    bus.files.remove_tree("data/topics/%24access")
    for accepted in (None, 1):
        with pytest.raises(StorageError, match=r"version 0 and had version 2.*access\.accept_version = 0 .*again$"):
            Bus(bus.files).open_gate("off", accept_version=accepted)
    empty = Bus(bus.files)
    gate = empty.open_gate("off", accept_version=0)
    await gate.settle()
    await empty.broker.close()
    again, gate = await gate_on(bus.files)
    assert await gate.put([ALICE], BOSS) == 1
    await again.broker.close()


@in_loop
async def test_a_table_of_before_its_version_was_noted_is_guarded_from_the_next_start_on() -> None:
    bus, gate = await gate_on()
    await gate.put([ALICE], BOSS)
    await bus.broker.close()
    bus.files.unlink("data/access.json")
    again, gate = await gate_on(bus.files)
    assert gate.table.version == 1
    await again.broker.close()
    bus.files.remove_tree("data/topics/%24access")
    with pytest.raises(StorageError, match="has version 0 and had version 1"):
        Bus(bus.files).open_gate("off")


@in_loop
async def test_a_change_counts_when_its_version_cannot_be_noted_and_the_next_start_notes_it() -> None:
    files = FaultyFiles()
    bus, gate = await gate_on(files)
    await gate.put([ALICE], BOSS)
    files.fail("rename", errno.ENOSPC, suffix="access.json.new")
    assert await gate.put([ROW], BOSS) == 2
    assert gate.table.rights("alice").may(Action.PUBLISH, "plant/alice/x")
    assert b'"version":1,' in files.read_file("data/access.json")
    await bus.broker.close()
    again, gate = await gate_on(files)
    assert set(gate.table.entries) == {id_of(ALICE), id_of(ROW)}
    assert b'"version":2,' in files.read_file("data/access.json")
    await again.broker.close()


@pytest.mark.parametrize("is_full_for_long", [False, True])
@in_loop
async def test_a_change_that_no_flush_made_durable_is_none_after_a_restart(is_full_for_long: bool) -> None:
    files = FaultyFiles()
    bus, gate = await gate_on(files)
    await gate.put([ALICE], BOSS)
    await gate.audit.close()
    files.fail("flush", errno.ENOSPC, suffix=LOG)
    if is_full_for_long:
        files.fail("pwrite", errno.ENOSPC, skip=1, suffix="%24access/0/00000000000000000002.log")
    with pytest.raises(StorageError):
        await gate.put([ROW], BOSS)
    assert id_of(ROW) not in gate.table.entries
    await bus.broker.close()
    again, gate = await gate_on(files)
    assert set(gate.table.entries) == {id_of(ALICE)}
    await again.broker.close()


@in_loop
async def test_nobody_sees_the_next_version_before_its_entries() -> None:
    files = FaultyFiles()
    bus, gate = await gate_on(files)
    seen: list[tuple[int, bool]] = []
    files.before_call = lambda operation, path: seen.append((gate.table.version, id_of(ALICE) in gate.table.entries))
    await gate.put([ALICE], BOSS)
    files.before_call = lambda operation, path: None
    assert set(seen) == {(0, False), (1, True)}
    assert gate.table.version == 1
    await bus.broker.close()


@in_loop
async def test_nothing_is_made_in_a_folder_that_needs_no_table() -> None:
    bus, gate = await gate_on()
    assert bus.broker.topic_names() == []
    assert not bus.files.exists("data/access.json")
    assert gate.identity("jebp:alice", "alice").rights is None
    await bus.broker.close()


@in_loop
async def test_of_two_who_change_at_once_the_second_is_told() -> None:
    bus, gate = await gate_on()
    first, second = await asyncio.gather(
        gate.put([ROW], BOSS, version=0), gate.put([ALICE], BOSS, version=0), return_exceptions=True
    )
    assert first == 1
    assert isinstance(second, AccessConflictError)
    assert gate.table.principal("alice") is None
    await bus.broker.close()


@in_loop
async def test_a_change_with_an_error_changes_nothing() -> None:
    bus, gate = await gate_on()
    with pytest.raises(InvalidAccessError):
        await gate.put([ALICE, Row("alice", "read", "a/#/b")], BOSS)
    assert gate.table.version == 0
    assert gate.table.principal("alice") is None
    await bus.broker.close()


@in_loop
async def test_a_change_that_is_none_makes_no_version() -> None:
    bus, gate = await gate_on()
    assert await gate.put([ROW], BOSS) == 1
    assert await gate.put([ROW], BOSS) == 1
    await bus.broker.close()


@pytest.mark.parametrize("cut", range(4))
@in_loop
async def test_a_change_that_was_cut_short_is_none(cut: int) -> None:
    bus, gate = await gate_on()
    keep, other = Row("alice", "read", "keep"), Row("alice", "read", "new")
    await gate.put([ALICE, keep], BOSS)
    noted = bus.files.read_file("data/access.json")
    await gate.change(edits_for([ROW, other], [keep]), BOSS)
    await bus.broker.close()
    bus.files.replace_file("data/access.json", noted)  # the version is noted behind the records
    log = bus.broker.topic("$access").partition(0).log
    again = Bus(bus.files)
    topic = again.broker.topic("$access")
    log = topic.partition(0).log
    positions = [one.offset for one in iterate(decode_chunk(log.read(0, 2**20, log.next_offset).data, verified=True))]
    assert len(positions) == 3 + 4
    data = bytes(log.read(0, 2**20, 3 + cut).data)
    await again.broker.close()
    path = next(path for path in bus.files.list_folder("data/topics/%24access/0") if path.endswith(".log"))
    path = f"data/topics/%24access/0/{path}"
    file = bus.files.open(path)
    file.truncate(len(data))
    file.close()
    for name in bus.files.list_folder("data/topics/%24access/0"):
        if not name.endswith(".log"):
            bus.files.unlink(f"data/topics/%24access/0/{name}")
    once_more, gate = await gate_on(bus.files)
    assert gate.table.version == (1 if cut == 0 else 2)  # taking back is a change
    assert sorted(gate.table.entries) == [id_of(ALICE), id_of(keep)]
    await gate.put([Row("bob", "read", "a")], BOSS)
    await once_more.broker.close()
    last, gate = await gate_on(bus.files)
    assert set(gate.table.entries) == {id_of(ALICE), id_of(keep), id_of(Row("bob", "read", "a"))}
    await last.broker.close()


@in_loop
async def test_a_disk_that_refuses_leaves_the_table_as_it_was() -> None:
    files = FaultyFiles()
    _, gate = await gate_on(files)
    await gate.put([ALICE], BOSS)
    await gate.audit.close()
    files.fail("pwrite", suffix=".log")
    with pytest.raises(StorageError):
        await gate.put([ROW], BOSS)
    assert gate.table.version == 1
    assert not gate.table.rights("alice").may(Action.PUBLISH, "plant/alice/x")


@in_loop
async def test_the_mode_of_the_table_turns_the_gate_on_and_tells_who_listens() -> None:
    bus, gate = await gate_on()
    told: list[bool] = []
    gate.on_changed.append(lambda: told.append(gate.enforcing))
    await gate.enable(BOSS)
    assert gate.identity("jebp:x", "x").rights is gate.table.rights("x")
    await gate.enable(BOSS, enforce=False)
    assert told == [True, False]
    await bus.broker.close()


@in_loop
async def test_who_listens_is_told_once_when_a_credential_has_expired() -> None:
    bus, gate = await gate_on()
    expiring = Credential("token", "t", {}, 0, bus.clock.now_ms() + 5_000)
    over = Credential("token", "o", {}, 0, bus.clock.now_ms() - 1)
    await gate.put([Principal("alice", (), (expiring, over)), Principal("bob")], BOSS)
    told: list[int] = []
    gate.on_changed.append(lambda: told.append(bus.clock.now_ms()))
    bus.clock.advance(4.999)
    gate.expire()
    assert told == []
    bus.clock.advance(0.001)
    for _ in range(2):
        gate.expire()
    assert told == [expiring.expires]
    bus.clock.jump_to(bus.clock.now_ms() - 1)  # it is valid again
    gate.expire()
    bus.clock.advance(0.001)
    gate.expire()
    assert told == [expiring.expires] * 2
    await bus.broker.close()


@in_loop
async def test_a_refusal_has_an_id_and_many_are_one_record() -> None:
    bus, gate = await gate_on()
    gate.mode = "enforce"
    await gate.put([ALICE], BOSS)
    client = gate.identity("zbus:1.2.3.4:5", "alice")
    ids = set()
    for _ in range(1000):
        with pytest.raises(AccessRefusedError) as caught:
            bus.broker.create_topic("news", principal=client).result()
        ids.add(caught.value.id)
    (id_,) = ids
    assert len(id_) == 8
    assert id_ in str(caught.value)
    bus.topic("$ok"[1:])
    await gate.audit.close()
    records = audited(bus.broker.topic("$audit"))
    assert [(one.kind, one.principal, one.action, one.subject, one.count, one.id) for one in records[1:]] == [
        ("refusal", "alice", "manage", "news", 1000, id_)
    ]
    assert records[1].source == "zbus:1.2.3.4:5"
    await bus.broker.close()


@in_loop
async def test_the_audit_has_changes_with_before_and_after_and_no_secret() -> None:
    bus, gate = await gate_on()
    await gate.put([ALICE], BOSS)
    await gate.put([Principal("alice", (), ALICE.credentials)], BOSS)
    await gate.audit.close()
    first, second = audited(bus.broker.topic("$audit"))
    assert (first.kind, first.principal, first.version, first.before) == ("change", "boss", 1, [None])
    assert second.before[0]["roles"] == ["sensors"]
    assert second.after[0]["roles"] == []
    assert "secret" not in msgspec.json.encode([first, second]).decode()
    await bus.broker.close()


@in_loop
async def test_a_flood_of_different_refusals_is_bounded() -> None:
    bus, gate = await gate_on()
    for number in range(5000):
        gate.audit.refused(Identity("test", f"user{number}", None), Action.READ, f"topic/{number}" * 100)
    await gate.audit.close()
    records = audited(bus.broker.topic("$audit"))
    assert len(records) <= 1025
    assert sum(one.count for one in records) == 5000
    await bus.broker.close()


@in_loop
async def test_whoever_is_refused_everywhere_does_not_hide_the_refusals_and_logins_of_others() -> None:
    bus, gate = await gate_on()
    gate.audit.refused(BOSS, Action.READ, "first")
    for number in range(5000):
        id_ = gate.audit.refused(BOSS, Action.READ, f"topic/{number}")
    gate.audit.refused(Identity("test", "thief", None), Action.PUBLISH, "gold")
    gate.audit.login("thief", "zbus 10.0.0.1")
    gate.audit.refused(BOSS, Action.READ, "first")
    await gate.audit.close()
    records = audited(bus.broker.topic("$audit"))
    of_boss = [one for one in records if one.principal == BOSS.name]
    assert len(of_boss) <= 65
    assert sum(one.count for one in of_boss) == 5002
    assert (of_boss[0].subject, of_boss[0].count) == ("first", 2)
    assert (of_boss[-1].id, of_boss[-1].reason, of_boss[-1].subject) == (id_, "too many to record each", "")
    of_thief = [(one.kind, one.action, one.subject, one.count) for one in records if one.principal == "thief"]
    assert of_thief == [("refusal", "publish", "gold", 1), ("login", "", "", 1)]
    await bus.broker.close()


FILE = """
[[rows]]
who = "role:sensors"
action = "publish"
pattern = "plant/{name}/#"

[[rows]]
who = "*"
action = "*"
pattern = "$sys/#"
effect = "deny"

[[principals]]
name = "alice"
roles = ["sensors"]
"""


@in_loop
async def test_a_table_file_replaces_what_the_last_one_brought_and_keeps_credentials() -> None:
    bus, gate = await gate_on()
    own = Row("bob", "read", "a")
    await gate.put([ALICE, own], BOSS)
    alice = gate.table.principal("alice")
    await gate.apply_file(FILE, "table.toml", SERVER)
    assert gate.table.principal("alice") == alice
    assert {row for row, origin in gate.table.rows() if origin == "table"} == {
        ROW,
        own,
        Row("*", "*", "$sys/#", Effect.DENY),
    }
    await gate.apply_file("", "table.toml", SERVER)
    assert {row for row, origin in gate.table.rows() if origin == "table"} == {own}
    await gate.audit.close()
    changes = audited(bus.broker.topic("$audit"))
    assert [(len(one.before), len(one.after)) for one in changes] == [(2, 2), (2, 2), (3, 3)]
    await bus.broker.close()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ('[[principals]]\nname = "alice"\nroles = ["admin"]\n', "the principal alice is in line 13 already"),
        (FILE, "the row allow role:sensors publish plant/{name}/# is in line 2 already"),
    ],
)
def test_a_table_file_with_something_twice_says_what_and_where_it_was(more: str, reason: str) -> None:
    with pytest.raises(TableFileError) as caught:
        read_table_file(FILE + more, "table.toml")
    assert str(caught.value).partition(": ")[2] == reason


TOKEN = '{ kind = "token", id = "t" }'


@pytest.mark.parametrize(
    ("before", "after", "line", "column"),
    [
        ('action = "*"', 'action = "write"', 9, 1),
        ('"$sys/#"', '"$sys/#/x"', 10, 1),
        ('who = "*"', 'who = "a b"', 8, 1),
        ('effect = "deny"', 'effect = "no"', 11, 1),
        ('effect = "deny"', 'effekt = "deny"', 11, 1),
        ('effect = "deny"', "effect = ", 11, 10),
        ('name = "alice"', 'name = "a/b"', 14, 1),
        ("[[principals]]", "[[people]]", 13, 3),
        ('pattern = "$sys/#"\n', "", 7, 1),
        ("[[principals]]", '[[principals]]\nname = "alice"\n\n[[principals]]', 16, 1),
        ("[[principals]]", f"{FILE[1:78]}\n[[principals]]", 13, 1),
        ('roles = ["sensors"]', 'roles = ["sensors", "guests", "sensors"]', 15, 1),
        ('roles = ["sensors"]', f"credentials = [{TOKEN}, {TOKEN}]", 15, 1),
    ],
)
@in_loop
async def test_an_error_of_a_table_file_has_line_and_column_and_the_old_table_stays(
    before: str, after: str, line: int, column: int
) -> None:
    bus, gate = await gate_on()
    await gate.apply_file(FILE, "table.toml", SERVER)
    assert before in FILE
    with pytest.raises(TableFileError, match=rf"^table.toml, line {line}, column {column}: "):
        await gate.apply_file(FILE.replace(before, after), "table.toml", SERVER)
    assert gate.table.version == 1
    assert gate.table.principal("alice") is not None
    await bus.broker.close()
