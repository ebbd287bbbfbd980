"""Addresses, file modes and users of a bus (docs/specifications/sbus.md, sections 13 and 14)."""

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from babelbus.clients.sbus import Client, connect
from babelbus.errors import ConfigError
from babelbus.protocols.sbus.packets.listeners import ABSTRACT, Door, open_door, read_door
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.sbus import configured, is_cut, join, service_of
from tests.support.server import LiveServer

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
STRANGER = 12_345


@pytest.mark.parametrize(
    ("group", "others", "mode"),
    [(False, False, 0o700), (True, False, 0o770), (False, True, 0o707), (True, True, 0o777)],
)
def test_the_file_has_the_mode_of_its_door_whatever_the_umask(
    tmp_path: Path, group: bool, others: bool, mode: int
) -> None:
    before = os.umask(0o077)
    try:
        door = open_door(Door(str(tmp_path / "s"), group, others))
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(door.address).st_mode) == mode
    door.close()
    assert not os.path.exists(door.address)


def test_an_address_that_is_taken_is_refused_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("anything")
    with pytest.raises(OSError, match="in use") as refused:
        open_door(Door(str(path)))
    assert refused.value.filename == str(path)
    with pytest.raises(OSError, match="in use"):
        open_door(Door(str(path)), replace_stale=True)  # no socket
    open_door(Door(str(path)), replace=True).close()


def test_a_socket_that_nobody_listens_on_is_replaced_and_a_living_one_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    killed = open_door(Door(path))
    killed.listener.close()
    door = open_door(Door(path), replace_stale=True)
    with pytest.raises(OSError, match="in use"):
        open_door(Door(path), replace_stale=True)
    killed.close()  # it knows that the file is not its own
    assert os.path.exists(path)
    door.close()


def test_a_relative_path_stays_where_it_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    door = open_door(Door("@name"))  # no special meaning
    monkeypatch.chdir("/")
    assert (tmp_path / "@name").exists()
    door.close()
    assert not (tmp_path / "@name").exists()


def test_a_path_has_at_most_107_bytes_unless_it_is_the_servers_own(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with pytest.raises(OSError, match="too long"):
        open_door(Door(str(folder / "s")))
    door = open_door(Door(str(folder / "s")), any_length=True)
    connect(str(folder / "s")).close()
    door.close()
    assert not (folder / "s").exists()


def test_an_abstract_address_is_made_up_and_all_its_108_bytes_count() -> None:
    door = open_door(Door(ABSTRACT))
    digits = door.address.removeprefix(f"{ABSTRACT}/")
    assert len(digits) == 216
    assert digits.startswith("00")
    connect(door.address).close()
    door.close()


def test_a_short_abstract_name_is_padded() -> None:
    name = b"\0babelbus-test-%d" % os.getpid()
    door = open_door(Door(f"{ABSTRACT}/{name.hex().upper()}"))
    connect(f"{ABSTRACT}/{name.hex()}").close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as short, pytest.raises(ConnectionRefusedError):
        short.connect(name)
    door.close()


@pytest.mark.parametrize("address", ["0", "0g", "0" * 218, ""])
def test_what_is_no_hex_name_is_a_path_which_is_not_there(address: str) -> None:
    with pytest.raises(OSError, match=r"No such file|too long"):
        open_door(Door(f"{ABSTRACT}/{address}"))


def test_a_socket_that_was_handed_over_is_used_and_its_file_left(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bound:
        bound.bind(path)
        door = open_door(Door(f"/dev/fd/{os.dup(bound.fileno())}"))
    connect(path).close()
    door.close()
    assert os.path.exists(path)


@pytest.mark.parametrize("number", ["99999", "99999999999999999999"])
def test_a_descriptor_that_is_none_is_refused(number: str) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        open_door(Door(f"/dev/fd/{number}"))


def test_an_empty_address_and_an_unknown_user_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        open_door(Door(""))
    with pytest.raises(ConfigError, match="nobody-of-this-name"):
        open_door(Door(str(tmp_path / "s"), users=("nobody-of-this-name",)))
    assert not (tmp_path / "s").exists()


def test_a_door_is_read_from_text() -> None:
    assert read_door("/a") == Door("/a")
    assert read_door("/a,group,others,user=1,user=b") == Door("/a", True, True, ("1", "b"))
    for text in ("", ",group", "/a,all", "/a,user="):
        with pytest.raises(ConfigError):
            read_door(text)


def test_several_doors_lead_to_one_bus(tmp_path: Path) -> None:
    config = configured(tmp_path, more_doors=f"{tmp_path}/second,group {ABSTRACT}")
    with LiveServer(config) as live, join(live, b"k") as client:
        first, second, third = (door.address for door in service_of(live).doors)
        assert stat.S_IMODE(os.stat(first).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(second).st_mode) == 0o770
        for number, address in enumerate((second, third)):
            with Client(address, timeout_seconds=SAFETY_NET_SECONDS) as other:
                other.publish(b"k", b"%d" % number)
                other.whoami()
        assert [client.receive_packet() for _ in range(2)] == [b"MSG k\x000", b"MSG k\x001"]
    assert not os.path.exists(first)
    assert not os.path.exists(second)


def as_stranger(address: str) -> str:
    """What a process of another user finds: the answer to whoami, or that it is shut out."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            try:
                with Client(address, timeout_seconds=SAFETY_NET_SECONDS) as client:
                    os.write(writer, client.whoami())
            except OSError as error:
                os.write(writer, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        said = answer.read().decode()
    os.waitpid(child, 0)
    return said.removesuffix(f"/{child}")


@as_root
def test_credentials_are_those_of_the_process_that_connected(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path, address=ABSTRACT)) as live:
        assert as_stranger(live.server.addresses["sbus"]) == f"!/cred/{STRANGER}/{STRANGER}"


@as_root
def test_only_the_users_of_the_list_and_the_servers_own_are_let_in(tmp_path: Path) -> None:
    shut_out = ("ConnectionResetError", "BrokenPipeError")
    with LiveServer(configured(tmp_path / "1", address=ABSTRACT, users="1, 2")) as live:
        assert as_stranger(live.server.addresses["sbus"]) in shut_out
        join(live).close()
    with LiveServer(configured(tmp_path / "2", address=ABSTRACT, users=f"{STRANGER}")) as live:
        assert as_stranger(live.server.addresses["sbus"]).startswith("!/cred/")


@as_root
def test_the_mode_of_the_file_keeps_strangers_out() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for others, expected in ((False, "PermissionError"), (True, f"!/cred/{STRANGER}/{STRANGER}")):
            config = configured(Path(folder) / "data", address=f"{folder}/s", others=others)
            with LiveServer(config) as live:
                assert as_stranger(live.server.addresses["sbus"]) == expected


def test_a_user_who_is_not_served_is_closed_after_connecting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveServer(configured(tmp_path)) as live:
        (door,) = service_of(live).doors
        monkeypatch.setattr(door, "users", frozenset({os.getuid() + 1}))
        with Client(live.server.addresses["sbus"], timeout_seconds=SAFETY_NET_SECONDS) as client:
            assert is_cut(client)
