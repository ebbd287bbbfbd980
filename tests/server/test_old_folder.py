"""A data folder of 2026-11-21, before the house was put in order: a server of today opens it and goes on with it.

It was made with the commands `topics create`, `publish`, `groups create`, `consume`, `state set` and two zbus requests.
Its database has one row for each batch since then: the tables of that day, which no release had, are refused.
"""

import tarfile
from pathlib import Path

import pytest

from babelbus.core.access import SERVER
from babelbus.core.topic import Topic
from babelbus.records.columns import decode_chunk, iterate
from tests.support.bus import in_loop
from tests.support.server import configure, running

ARCHIVE = Path(__file__).parent / "data_folder_of_2026_11_21.tar.gz"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        if hasattr(tarfile, "fully_trusted_filter"):  # Python 3.12 and later versions of 3.11
            archive.extraction_filter = tarfile.fully_trusted_filter
        archive.extractall(tmp_path)  # ours, so its paths are good
    return tmp_path


async def payloads(topic: Topic) -> list[bytes]:
    read: list[bytes] = []
    for partition in topic.partitions:
        chunk = await partition.read(0, 2**20)
        read += [record.payload or b"" for record in iterate(decode_chunk(chunk.data))]
    return read


@in_loop
async def test_a_data_folder_of_before_opens_with_all_that_it_holds(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = [b"%d" % number for number in range(1, 51)]
    for _ in range(2):  # what the first start wrote anew, the second one reads
        async with running(configure(folder)) as server:
            broker = server.broker
            assert sorted(broker.topic_names()) == ["$state", "Q", "plant", "prices", "rows"]
            assert set(numbers) | {b"21.5", b'"left"'} == set(await payloads(broker.topic("plant")))
            assert await payloads(broker.topic("rows")) == numbers[:30]
            assert broker.topic("prices").settings.cleanup == "compact"
            assert broker.topic("prices").settings.retain == "last"
            assert broker.state.find("plant/line1/temp") == b"21.5"
            assert broker.state.find("plant/line1/name") == b'"left"'
            workers, channel = broker.groups.find("plant", "workers"), broker.groups.find("Q", "c")
            assert workers is not None
            assert workers.info().lag == 32
            assert channel is not None
            assert not broker.damaged_topics
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


@in_loop
async def test_a_folder_that_every_user_could_read_is_closed_to_others_and_opens(folder: Path) -> None:
    open_to_all(folder)
    async with running(configure(folder)) as server:
        assert len(await payloads(server.broker.topic("rows"))) == 30
        await server.broker.create_topic("new", 1, {"engine": "db"}, principal=SERVER)
        assert readable(Path(server.folder)) == []


def open_to_all(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def readable(root: Path) -> list[Path]:
    """The folders, and the files in the outermost one, that other users can read; sockets have modes of their own."""
    paths = [root, *root.iterdir(), *(path for path in root.rglob("*") if path.is_dir())]
    return [path for path in paths if path.name != "run" and path.stat().st_mode & 0o077]
