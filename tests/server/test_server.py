"""A whole server on real sockets: hostile and unlucky peers, its files, its start and its stop."""

import errno
import os
import random
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from babelbus.clock import SystemClock
from babelbus.config import AdminSettings, JebpSettings, ServerSettings, TopicDefaults
from babelbus.core.access import SERVER
from babelbus.errors import ConfigError, StorageError
from babelbus.protocols.jebp.codec import encode_request
from babelbus.protocols.jebp.frames import encode_frame
from babelbus.protocols.jebp.handshake import ClientHandshake
from babelbus.protocols.jebp.identity import Identity
from babelbus.protocols.jebp.messages import CreateRecords
from babelbus.records.format import encode_batch
from babelbus.records.record import Record
from babelbus.server.app import Server
from babelbus.storage.disk.store import FolderStore
from babelbus.storage.errors import FolderLockedError
from babelbus.storage.files import LocalFiles
from babelbus.web.server import health_reasons
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.jebp import Caller, create, create_many, create_topic, fetch, fetched, remove_topic, said, subscribe
from tests.support.server import LiveServer, configure

LONG_SECONDS = 1_000.0
"""The time for a handshake, of which nobody waits for the end: `LiveServer.skip` lets it be over."""
MIB = 2**20


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def live(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(configure(tmp_path), use_uvloop=request.param) as server:
        yield server


def sample(live: LiveServer, name: str, **labels: str) -> float:
    """The value of a metric."""
    return live.call(lambda: live.server.metrics.registry.get_sample_value(f"babelbus_{name}", labels)) or 0.0


def works(live: LiveServer, topic: str = "alive") -> bool:
    """Whether the server still does its work for a client that behaves."""
    with live.caller() as caller:
        requests = (create_topic(topic), create(topic, b"x"), remove_topic(topic))
        return [said(caller.ask(request)[0]) for request in requests] == ["a130", "a130", "a230"]


# -- hostile and unlucky peers ---------------------------------------------------------------------------------------


def test_random_bytes_cost_the_peer_its_connection_and_nobody_else_anything(live: LiveServer) -> None:
    chance = random.Random(1)
    for _ in range(50):
        with live.dial() as peer:
            peer.socket.recv(100)
            first = chance.choice([b"\x01", b"", b"\x01\x01\x20"])
            peer.socket.sendall(first + chance.randbytes(chance.randint(2000, 4000)))
            assert peer.is_closed()
    live.until(lambda: not live.connections)
    assert works(live)


def test_random_bytes_after_the_handshake_close_too(live: LiveServer) -> None:
    chance = random.Random(2)
    for _ in range(20):
        with live.caller() as peer:
            peer.socket.sendall(chance.randbytes(20) if chance.random() < 0.5 else encode_frame(chance.randbytes(50)))
            peer.socket.shutdown(socket.SHUT_WR)
            assert peer.is_closed()
    assert works(live)


@pytest.mark.parametrize("established", [False, True])
@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 16 * MIB + 1])
def test_a_frame_that_promises_too_much_is_refused_before_any_of_it_arrives(
    live: LiveServer, length: int, established: bool
) -> None:
    with live.caller() if established else live.dial() as peer:
        if not established:
            peer.socket.recv(100)
        peer.socket.sendall(b"\x01\x08" + struct.pack(">Q", length))
        assert peer.is_closed()
    assert works(live)


@pytest.mark.parametrize("head", [b"\x00", b"\x02", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n", b"\x01\x09"])
def test_what_is_no_frame_closes_at_its_first_bytes(live: LiveServer, head: bytes) -> None:
    with live.dial() as peer:
        peer.socket.recv(100)
        peer.socket.sendall(head)
        assert peer.is_closed()


def test_a_handshake_that_never_ends_is_ended(tmp_path: Path) -> None:
    config = configure(tmp_path, jebp=JebpSettings(port=0, handshake_seconds=LONG_SECONDS))
    with LiveServer(config, use_uvloop=False) as live, live.caller() as done:
        assert said(done.ask(b"\x99")[0]) == "b030"
        silent, half = live.dial(), live.dial()
        shake = ClientHandshake(live.admin, bool)
        half.socket.sendall(shake.receive_data(half.socket.recv(100)))
        assert len(half.socket.recv(100)) == 35  # the server's key: it goes on as long as the client does
        silent.socket.recv(100)
        live.skip(LONG_SECONDS)
        for peer in (half, silent):
            assert peer.is_closed()
            peer.close()
        live.until(lambda: sample_now(live, "connections_refused_total", reason="handshake") == 2)
        assert said(done.ask(b"\x99")[0]) == "b030"  # one that is done stays


def sample_now(live: LiveServer, name: str, **labels: str) -> float:
    """As `sample`, from inside the event loop."""
    return live.server.metrics.registry.get_sample_value(f"babelbus_{name}", {"protocol": "jebp", **labels}) or 0.0


def test_an_unknown_client_is_closed_and_told_nothing(live: LiveServer) -> None:
    stranger = Caller(live.address, Identity.generate()).connect()  # its side of the handshake is done
    stranger.send(create_topic("mine"))
    assert stranger.is_closed()
    stranger.close()
    assert live.call(lambda: list(live.server.topic_list.topics())) == []
    assert sample(live, "connections_refused_total", protocol="jebp", reason="identity") == 1
    assert works(live)


def test_connections_over_the_limit_are_refused_until_there_is_room(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path, jebp=JebpSettings(port=0, connections_max=3))) as live:
        callers = [live.caller() for _ in range(3)]
        for _ in range(5):
            with live.dial() as refused:
                assert refused.is_closed()
        assert sample(live, "connections_refused_total", protocol="jebp", reason="limit") == 5
        callers.pop().close()
        live.until(lambda: len(live.connections) == 2)
        callers.append(live.caller())
        for caller in callers:
            assert said(caller.ask(b"\x99")[0]) == "b030"
            caller.close()
        live.until(lambda: not live.connections)
        assert sample(live, "connections", protocol="jebp") == 0


def test_a_thousand_idle_connections_leave_room_for_one_that_works(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2200:
        pytest.skip(f"2,200 descriptors are needed, the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2200), hard))
    try:
        with LiveServer(configure(tmp_path)) as live:
            admin = live.admin
            idle = [Caller(live.address, admin).connect() for _ in range(1000)]
            live.until(lambda: len(live.connections) == 1000)
            with live.caller() as busy:
                busy.ask(create_topic("news"))
                assert [said(one) for one in busy.ask(*[create("news", b"x")] * 2000)] == ["a130"] * 2000
            assert said(idle[0].ask(b"\x99")[0]) == said(idle[-1].ask(b"\x99")[0]) == "b030"
            for caller in idle:
                caller.close()
            live.until(lambda: not live.connections)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_client_that_stops_reading_costs_little_and_loses_nothing(tmp_path: Path) -> None:
    bound = 2 * MIB
    server = ServerSettings(outbox_bytes_max=bound)
    with LiveServer(configure(tmp_path, server=server, topics=TopicDefaults(ack="written"))) as live:
        with live.caller() as writer:
            writer.ask(create_topic("news"), *[create("news", bytes((number,)) * 64_000) for number in range(16)])
        asked = 60
        slow = live.caller(receive_bytes=65_536)
        slow.send(subscribe("news"), *[fetch(0, MIB)] * asked, create("news", b"last"))
        (connection,) = live.call(lambda: list(live.connections))
        live.until(lambda: connection._paused and connection.outbox_bytes >= bound)
        assert works(live)
        for _ in range(20):
            assert live.call(lambda: connection.outbox_bytes) <= bound + MIB
        assert live.call(lambda: live.server.broker.topic("news").partitions[0].next_offset) == 16
        answers = slow.hear(asked + 2)
        assert said(answers[0]) == "a030"
        for answer in answers[1:-1]:
            assert len(answer.content) == len(answers[1].content)
        assert [len(found) for found in fetched(answers[1]).values()] == [16]
        assert said(answers[-1]) == "a130"
        slow.close()


def test_a_fast_reader_that_asks_for_much_at_once_gets_it_all(live: LiveServer) -> None:
    """Work that is put off goes on although the peer took all answers at once and so never made room."""
    with live.caller() as caller:
        caller.ask(create_topic("news"), create_many("news", [b"x" * 1000] * 1000))
        heard: list[int] = []
        asked = 100
        reading = threading.Thread(target=lambda: heard.extend(len(one.content) for one in caller.hear(asked + 1)))
        reading.start()
        caller.send(subscribe("news"), *[fetch(0, 2 * MIB)] * asked)
        reading.join(SAFETY_NET_SECONDS)
        assert not reading.is_alive()
        assert len(set(heard[1:])) == 1
        assert heard[1] > 1_000_000


def test_a_client_that_asks_and_shuts_its_side_is_still_answered(live: LiveServer) -> None:
    with live.caller() as caller:
        caller.ask(create_topic("news"))
        caller.send(*[create("news", b"x")] * 500, b"\x99")
        caller.socket.shutdown(socket.SHUT_WR)
        assert [said(one) for one in caller.hear(501)] == ["a130"] * 500 + ["b030"]
        assert caller.is_closed()


def test_a_client_that_goes_away_in_the_middle_of_a_frame_leaves_what_was_whole(live: LiveServer) -> None:
    caller = live.caller()
    caller.ask(create_topic("news"))
    data = caller.wire.seal([create("news", b"whole"), create("news", b"half")])
    caller.socket.sendall(data[:-1])
    caller.close()
    live.until(lambda: not live.connections)
    with live.caller() as reader:
        answer = reader.ask(subscribe("news"), fetch(0))[1]
        assert fetched(answer) == {("news", 0): [b"whole"]}


# -- its files -------------------------------------------------------------------------------------------------------


def test_the_first_start_makes_keys_for_its_owner_only_and_later_ones_keep_them(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path)) as live:
        made = {name: (live.conf / name).read_bytes() for name in ("server_key", "admin_key")}
        for name in made:
            assert (live.conf / name).stat().st_mode & 0o777 == 0o600
        with live.caller() as caller:
            caller.ask(create_topic("a/b"), create("a/b", b"kept"))
    with LiveServer(configure(tmp_path)) as live, live.caller() as caller:
        assert {name: (live.conf / name).read_bytes() for name in made} == made
        assert fetched(caller.ask(subscribe("a/b"), fetch(0))[1]) == {("a/b", 0): [b"kept"]}


def test_an_administrator_that_was_taken_off_the_list_does_not_come_back_by_a_restart(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path)) as live:
        (live.conf / "client_fingerprints").write_text("# nobody\n")
    with LiveServer(configure(tmp_path)) as live:
        caller = live.caller()
        assert caller.is_closed()
        caller.close()


def test_a_first_start_that_was_cut_short_is_finished_by_the_next(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path)) as live:
        admin = live.admin.fingerprint
        for name in ("server_key", "client_fingerprints", "client_admin_rights"):
            (live.conf / name).unlink()
    with LiveServer(configure(tmp_path)) as live:
        assert live.admin.fingerprint == admin
        assert works(live)


def test_a_reload_lets_clients_in_and_closes_those_that_were_removed(live: LiveServer) -> None:
    guest = Identity.generate()
    clients = live.conf / "client_fingerprints"
    before = clients.read_text()
    clients.write_text(f"{before}{guest.fingerprint} guest\n")
    live.run(partial(live.server.reload, SERVER))
    caller, admin = Caller(live.address, guest).connect(), live.caller()
    assert said(caller.ask(create_topic("a"))[0]) == "b730"
    clients.write_text(before)
    live.run(partial(live.server.reload, SERVER))
    assert caller.is_closed()
    caller.close()
    assert said(admin.ask(create_topic("a"))[0]) == "a130"  # who stayed in the list stayed connected
    admin.close()


def test_a_reload_of_a_list_that_is_wrong_names_the_line_and_changes_nothing(live: LiveServer) -> None:
    with live.caller() as admin:
        clients, topics = live.conf / "client_fingerprints", live.conf / "topics"
        good = clients.read_text()
        clients.write_text("nonsense\n")
        with pytest.raises(ConfigError, match="client_fingerprints, line 1"):
            live.run(partial(live.server.reload, SERVER))
        clients.write_text("# nobody\n")
        topics.write_text("a,b\n")
        with pytest.raises(ConfigError, match="topics, line 1"):
            live.run(partial(live.server.reload, SERVER))
        assert said(admin.ask(create_topic("a"))[0]) == "a130"
        clients.write_text(good)


def test_topics_that_are_written_into_the_list_by_hand_are_made(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path)) as live, live.caller() as caller:
        topics = live.conf / "topics"
        caller.ask(create_topic("first"))
        live.until(lambda: live.server.topic_list.last.done)
        topics.write_text("# ours\nfirst 2\nsecond\n\nthird 3\n")
        live.run(partial(live.server.reload, SERVER))
        counts = live.call(lambda: {name: len(one.partitions) for name, one in live.server.topic_list.topics().items()})
        assert counts == {"first": 2, "second": 1, "third": 3}
        caller.ask(remove_topic("second"), create_topic("fourth"))
        live.until(lambda: live.server.topic_list.last.done)
        assert topics.read_text() == "# ours\nfirst 2\n\nthird 3\nfourth 1\n"
        topics.write_text("fifth\n")  # taking a line away removes no records
    with LiveServer(configure(tmp_path)) as live:
        assert sorted(live.call(lambda: list(live.server.topic_list.topics()))) == ["fifth", "first", "fourth", "third"]
        assert sorted((live.conf / "topics").read_text().split("\n")[:-1]) == [
            "fifth 1", "first 2", "fourth 1", "third 3",
        ]  # fmt: skip


def test_a_topic_whose_removal_a_crash_cut_short_stays_removed(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path)) as live, live.caller() as caller:
        caller.ask(create_topic("gone"), create_topic("kept"))
    # The crash came between the rename of the folder and the list.
    FolderStore(LocalFiles(), str(tmp_path), SystemClock()).hide("gone")
    with LiveServer(configure(tmp_path)) as live:
        assert live.call(lambda: list(live.server.topic_list.topics())) == ["kept"]
        assert (live.conf / "topics").read_text() == "kept 1\n"


class FullFor(LocalFiles):
    """The files of this machine, on a disk that has no room for one of them while it is `full`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.full = False

    def replace_file(self, path: str, content: bytes, *, mode: int = 0o600) -> None:
        if self.full and path.endswith(self.name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.name)
        super().replace_file(path, content, mode=mode)


def test_a_removed_topic_stays_removed_when_the_list_of_topics_cannot_be_written(tmp_path: Path) -> None:
    files = FullFor("conf/topics")
    with LiveServer(configure(tmp_path), files=files) as live, live.caller() as caller:
        caller.ask(create_topic("gone"), create_topic("kept"))
        live.until(lambda: live.server.topic_list.last.done)
        files.full = True
        assert said(caller.ask(remove_topic("gone"))[0]) == "a230"
        live.until(lambda: live.server.topic_list.last.error is not None)
        live.run(partial(live.server.reload, SERVER))
        assert live.call(lambda: list(live.server.topic_list.topics())) == ["kept"]
        assert "gone" in (live.conf / "topics").read_text()
    with pytest.raises(StorageError), LiveServer(configure(tmp_path), files=files):  # as if it was killed there
        pass
    files.full = False
    for _ in range(2):
        with LiveServer(configure(tmp_path), files=files) as live:
            assert live.call(lambda: list(live.server.topic_list.topics())) == ["kept"]
            assert (live.conf / "topics").read_text() == "kept 1\n"
    assert [name for name in os.listdir(tmp_path / "topics") if not name.startswith("%24")] == ["kept"]


def test_health_names_a_list_of_topics_that_is_not_saved_until_a_cleaning_has_saved_it(tmp_path: Path) -> None:
    files = FullFor("conf/topics")
    with LiveServer(configure(tmp_path), files=files) as live, live.caller() as caller:
        caller.ask(create_topic("gone"), create_topic("kept"))
        files.full = True
        caller.ask(remove_topic("gone"))
        live.until(lambda: live.server.topic_list.last.error is not None)
        live.run(live.server.broker.clean)
        live.until(lambda: live.server.topic_list.last.done)
        assert live.call(lambda: health_reasons(live.server)) == [
            "not saved: the list of topics ([Errno 28] No space left on device: 'conf/topics')"
        ]
        files.full = False
        live.run(live.server.broker.clean)
        live.until(lambda: not health_reasons(live.server))
        assert (live.conf / "topics").read_text() == "kept 1\n"


def test_topics_are_made_with_the_partitions_of_the_configuration(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path, topics=TopicDefaults(partitions=3, ack="written"))) as live:
        with live.caller() as caller:
            caller.ask(create_topic("news"))
        topic = live.call(lambda: live.server.broker.topic("news"))
        assert (len(topic.partitions), topic.settings.ack) == (3, "written")


# -- start and stop --------------------------------------------------------------------------------------------------


def test_two_servers_do_not_share_a_folder(live: LiveServer) -> None:
    with pytest.raises(FolderLockedError, match=f"process {os.getpid()}"), LiveServer(live.config):
        pass
    assert works(live)


def test_a_start_that_fails_gives_the_folder_back(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"), LiveServer(configure(tmp_path, jebp=JebpSettings(port=port))):
            pass
    with LiveServer(configure(tmp_path)) as live:
        assert works(live)


def test_a_stop_answers_what_was_asked(live: LiveServer) -> None:
    caller = live.caller()
    caller.ask(create_topic("news"))
    count = 3000
    caller.send(*[create("news", b"%d" % number) for number in range(count)])
    partition = live.call(lambda: live.server.broker.topic("news").partitions[0])
    live.until(lambda: partition.next_offset == count)
    live.ask_to_stop()
    assert [said(one) for one in caller.hear(count)] == ["a130"] * count
    assert caller.is_closed()
    caller.close()


def test_a_stop_waits_for_answers_that_the_peer_is_still_reading(live: LiveServer) -> None:
    caller = live.caller(receive_bytes=65_536)
    caller.ask(create_topic("news"), create_many("news", [b"x" * 1000] * 1000))
    asked = 12
    caller.send(subscribe("news"), *[fetch(0, 2 * MIB)] * asked)
    (connection,) = live.call(lambda: list(live.connections))
    live.until(lambda: connection.outbox_bytes > 0)
    live.ask_to_stop()
    assert len(caller.hear(asked + 1)) == asked + 1
    assert caller.is_closed()
    caller.close()


def test_a_stop_does_not_wait_for_ever_for_a_peer_that_reads_nothing(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path, server=ServerSettings(drain_seconds=0.05))) as live:
        caller = live.caller(receive_bytes=65_536)
        caller.ask(create_topic("news"), create_many("news", [b"x" * 1000] * 1000))
        caller.send(subscribe("news"), *[fetch(0, 2 * MIB)] * 12)
        (connection,) = live.call(lambda: list(live.connections))
        live.until(lambda: connection.outbox_bytes > 0)
    caller.close()


def test_a_server_says_where_it_listens_and_what_it_is_about_to_do(live: LiveServer) -> None:
    assert isinstance(live.server, Server)
    assert live.address.startswith("127.0.0.1:")
    assert not live.address.endswith(":0")
    assert not live.server.stopping


def test_a_topic_with_damaged_settings_is_named_by_health_and_stays_in_the_list(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path)) as live, live.caller() as caller:
        for name in ("good", "bad"):
            caller.ask(create_topic(name))
    settings = tmp_path / "topics/bad/settings.json"
    content = settings.read_bytes()
    settings.write_bytes(content[:20] + bytes([content[20] ^ 0x80]) + content[21:])
    with LiveServer(configure(tmp_path)) as live:
        assert works(live)  # with a change of the list of topics
        (reason,) = live.call(lambda: health_reasons(live.server))
        assert reason.startswith("topic bad is not open: settings.json of topic 'bad' is damaged")
        with live.caller() as caller:
            batch = CreateRecords("bad", -1, -1, -1, bytes(encode_batch([Record(b"x", None, (), 1)], 0).data))
            for request in (create("bad", b"x"), encode_request(batch)):
                assert said(caller.ask(request)[0]) == "b331"  # try again
    settings.write_bytes(content)
    with LiveServer(configure(tmp_path)) as live:
        assert sorted(live.call(lambda: list(live.server.topic_list.topics()))) == ["bad", "good"]
        assert "bad 1" in (live.conf / "topics").read_text()


def test_a_folder_of_pages_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    admin = AdminSettings(port=0, docs_folder=str(tmp_path / "nothing"))
    config = msgspec.structs.replace(configure(tmp_path / "data"), admin=admin)
    with pytest.raises(ConfigError, match=r"admin\.docs_folder: .*/nothing: no such folder"), LiveServer(config):
        pass
