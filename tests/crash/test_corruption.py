"""Random damage to any file of a data folder: `check` names it, or every answer of a server is right.

See rows 3, 4 and 5 of the fault matrix. A folder with all kinds of files is copied, a file of the copy is damaged, and
`check` and a server read it. No record is served that nobody sent, no offset is given twice, nothing fails with a
traceback. The seed is in the name of a test; BABELBUS_TEST_SEED chooses another first one.
"""

import asyncio
import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from babelbus.cli.repair import check
from babelbus.config import Config, GroupsSettings, StateSettings, StorageSettings, TopicDefaults
from babelbus.core.access import SERVER
from babelbus.core.groups import at_offset
from babelbus.core.record import Event
from babelbus.core.topic import Topic
from babelbus.errors import BabelbusError
from babelbus.records.columns import decode_chunk, iterate
from babelbus.server.app import Server
from babelbus.storage.errors import OffsetOutOfRangeError
from tests.support.bus import batch, done, in_loop, publish
from tests.support.server import configure, running

SEED = int(os.environ.get("BABELBUS_TEST_SEED", "1"))
QUICK = range(SEED, SEED + 8)
SLOW = range(SEED + 8, SEED + 408)
COUNT = 120
"""Records of each topic."""
KEYS = 40
COMMITTED = 50
TOPICS: dict[str, dict[str, object]] = {
    "news": {},
    "prices": {"cleanup": "compact", "retain": "last"},
    "rows": {"engine": "db"},
}
BY_HAND = ("conf", "admin_token", "lock", "run")
"""Files without a checksum: an operator writes them, or the next start makes them."""


def settings(folder: Path) -> Config:
    made = configure(
        folder,
        topics=TopicDefaults(segment_bytes=2048, ack="written"),
        storage=StorageSettings(segment_bytes=2048, checkpoint_bytes=4096),
    )
    state = StateSettings(ack="written", checkpoint_bytes=4096)
    return msgspec.structs.replace(made, groups=GroupsSettings(commit_seconds=0.01), state=state)


def payload(number: int) -> bytes:
    return b"%06d" % number + b"." * (number * 7919 % 90)


def event(topic: str, number: int) -> Event:
    return Event(f"{topic}/{number % KEYS}", payload(number), b"%d" % (number % KEYS))


async def fill(server: Server) -> None:
    """Make every kind of file that a data folder has."""
    broker = server.broker
    for topic, settings_of in TOPICS.items():
        await broker.create_topic(topic, 1, dict(settings_of), principal=SERVER)
        for number in range(COUNT):
            (receipt,) = await done(publish(broker, [event(topic, number)]))
            assert (receipt.error, receipt.base_offset) == (None, number)
        broker.groups.create(topic, "workers", start=at_offset(COMMITTED), principal=SERVER)
        staged = broker.staging.stage("t", 0, "p", topic, batch(b"x", b"y"), first_record=0)
        await done([staged])
        assert staged.error is None
    for number in range(COUNT):
        broker.state.set(f"state/{number}", payload(number).replace(b".", b"1"))
        await done([broker.state.commit("test")])
    await broker.groups.commit()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder whose server was stopped in order."""
    folder = tmp_path_factory.mktemp("whole") / "data"

    @in_loop
    async def build() -> None:
        async with running(settings(folder)) as server:
            await fill(server)

    build()
    return folder


def flip(content: bytearray, chance: random.Random) -> None:
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)


def overwrite(content: bytearray, chance: random.Random) -> None:
    at, size = chance.randrange(len(content)), chance.choice([1, 4, 100, 4096])
    content[at : at + size] = chance.randbytes(len(content[at : at + size]))


def zero(content: bytearray, chance: random.Random) -> None:
    at, size = chance.randrange(len(content)), chance.choice([4, 512, 4096])
    content[at : at + size] = bytes(len(content[at : at + size]))


def cut(content: bytearray, chance: random.Random) -> None:
    del content[chance.randrange(len(content)) :]


def extend(content: bytearray, chance: random.Random) -> None:
    content.extend(chance.choice([chance.randbytes(50), bytes(4096), bytes(content[: len(content) // 2])]))


def repeat(content: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(content))
    content[at:at] = content[at : at + chance.choice([1, 20, 500])]


DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (flip, flip, overwrite, zero, cut, extend, repeat)


def damage(folder: Path, chance: random.Random) -> tuple[Path, str]:
    """Damage one file, and return which, and how."""
    # A kind of file first: there are more segments than anything else.
    kinds: dict[tuple[str, str], list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            kinds.setdefault((path.relative_to(folder).parts[0], path.suffix), []).append(path)
    path = chance.choice(kinds[chance.choice(sorted(kinds))])
    content = bytearray(path.read_bytes())
    if not content or chance.random() < 0.1:
        path.unlink()
        return path, "removed"
    how = chance.choice(DAMAGES)
    how(content, chance)
    with path.open("r+b") as file:  # in place, as a disk does it
        file.write(content)
        file.truncate(len(content))
    return path, how.__name__


async def numbers_of(topic: Topic, failures: list[str]) -> list[int]:
    """Return the numbers of all records that are served; each is what was sent, at its offset."""
    (partition,) = topic.partitions
    numbers: list[int] = []
    offset = 0
    while offset < min(partition.high_watermark, COUNT):
        try:
            chunk = await partition.read(offset, 4096)
        except OffsetOutOfRangeError as error:
            failures.append(str(error))
            offset = max(error.first, offset + 1)
            continue
        except BabelbusError as error:
            failures.append(str(error))
            offset += 1
            continue
        for record in iterate(decode_chunk(chunk.data)):
            if record.offset < COUNT:
                assert (record.payload, record.key) == (payload(record.offset), b"%d" % (record.offset % KEYS))
                numbers.append(record.offset)
        offset = max(chunk.next_offset, offset + 1)
    assert numbers == sorted(set(numbers))
    return numbers


async def ask(server: Server) -> list[str]:
    """Check that nothing wrong is served; return what is missing."""
    broker = server.broker
    missing: list[str] = []
    for name in TOPICS:
        if name not in broker.topic_names() or name in broker.damaged_topics:
            missing.append(f"topic {name}")
            continue
        topic = broker.topic(name)
        numbers = set(await numbers_of(topic, missing))
        least = set(range(COUNT - KEYS, COUNT) if name == "prices" else range(COUNT))
        missing += [f"{name}: {number}" for number in sorted(least - numbers)]
        group = broker.groups.find(name, "workers")
        if group is None:
            missing.append(f"the group on {name}")
        else:
            (cursor,) = group.info().cursors
            assert cursor.committed <= COMMITTED, "the group passes over records"
            if cursor.committed < COMMITTED:
                missing.append(f"acks of the group on {name}")
        (receipt,) = await done(publish(broker, [event(name, COUNT)]))
        if receipt.error is None:
            assert receipt.base_offset >= COUNT, "an offset is given twice"
        else:
            missing.append(f"{name} takes nothing: {receipt.error}")
    for number in range(COUNT):
        value = broker.state.find(f"state/{number}")
        assert value in (None, payload(number).replace(b".", b"1"))
        if value is None:
            missing.append(f"state/{number}")
    return missing


async def run(folder: Path) -> list[str]:
    """Start a server on a folder, ask it everything, and stop it; return what is missing."""
    try:
        async with running(settings(folder)) as server:
            return await ask(server)
    except (BabelbusError, OSError) as error:
        return [f"no start: {error}"]


def problems_of(folder: Path) -> list[dict[str, object]]:
    """Return what `babelbus check` says is wrong."""
    result = CliRunner().invoke(check, [str(folder), "--json"], env={"BABELBUS_DATA_FOLDER": str(folder)})
    assert result.exit_code in (0, 1), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert bool(rows[:-1]) == (result.exit_code == 1)
    return rows[:-1]


def test_a_whole_folder_has_no_problem_and_all_answers(original: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(original, folder)
    assert problems_of(folder) == []
    assert asyncio.run(run(folder)) == []


@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)])
def test_damage_is_named_or_every_answer_is_right(
    original: Path, tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(original, folder)
    path, how = damage(folder, random.Random(seed))
    with caplog.at_level(logging.WARNING):
        problems = problems_of(folder)
        missing = asyncio.run(run(folder))
    told = f"{path.relative_to(folder)} {how}"
    assert not [record.exc_text for record in caplog.records if record.exc_info], told
    if path.relative_to(folder).parts[0] not in BY_HAND:
        assert problems or not missing, f"{told}: check says nothing, but {missing[:5]}"
