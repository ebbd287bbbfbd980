"""The three lists that an operator edits by hand: read, changed, written back, and what a mistake in one says."""

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.access import Credential, Principal
from babelbus.core.subject import check_topic_name
from babelbus.errors import ConfigError, InvalidTopicNameError
from babelbus.server.access import AccessLists, ClientEntry
from babelbus.storage.files import LocalFiles
from babelbus.storage.memory import MemoryFiles
from tests.storage.faults import FaultyFiles

A, B, C = "a" * 64, "b" * 64, "c" * 64


def is_topic_name(name: str) -> bool:
    try:
        check_topic_name(name)
    except InvalidTopicNameError:
        return False
    return True


class Folder:
    def __init__(self, **files: str) -> None:
        self.files = MemoryFiles()
        self.lists = AccessLists(self.files, "conf")
        for name, content in files.items():
            self.write(name, content)

    def write(self, name: str, content: str) -> None:
        self.files.replace_file(f"conf/{name}", content.encode())

    def read(self, name: str) -> str:
        return self.files.read_file(f"conf/{name}").decode()


# -- clients ---------------------------------------------------------------------------------------------------------


def test_missing_files_let_nobody_in() -> None:
    folder = Folder()
    folder.lists.reload()
    assert folder.lists.clients == {}
    assert folder.lists.entries() == []
    assert folder.lists.read_topics() == {}


def test_rights_come_from_the_two_lists() -> None:
    folder = Folder(
        client_fingerprints=f"# who may connect\n\n{A} the console\n  {B}\tsensor  7 \n{C}\n",
        client_admin_rights=f"# who may administer\n{A}\n",
    )
    folder.lists.reload()
    assert folder.lists.clients == {
        A: ClientEntry(A, "the console", True),
        B: ClientEntry(B, "sensor  7", False),
        C: ClientEntry(C, C[:16], False),
    }
    assert folder.lists.entries() == [
        Principal("the console", ("admin",), (Credential("jebp", A, {"fingerprint": A}),)),
        Principal("sensor  7", ("client",), (Credential("jebp", B, {"fingerprint": B}),)),
        Principal(C[:16], ("client",), (Credential("jebp", C, {"fingerprint": C}),)),
    ]


def test_keys_of_one_name_are_principals_of_their_own() -> None:
    folder = Folder(client_fingerprints=f"{A} x\n{B} x\n{C} y\n", client_admin_rights=f"{A}\n")
    folder.lists.reload()
    names = {one.name: one.roles for one in folder.lists.entries(lambda name: name == "y")}
    assert names == {f"x-{A[:16]}": ("admin",), f"x-{B[:16]}": ("client",), f"y-{C[:16]}": ("client",)}


def test_a_key_with_the_name_of_strangers_gives_them_nothing() -> None:
    folder = Folder(client_fingerprints=f"{A} anonymous\n", client_admin_rights=f"{A}\n")
    folder.lists.reload()
    assert [one.name for one in folder.lists.entries()] == [f"anonymous-{A[:16]}"]


def test_administrative_rights_alone_let_nobody_in(caplog: pytest.LogCaptureFixture) -> None:
    folder = Folder(client_fingerprints=f"{A} a\n", client_admin_rights=f"{B}\n")
    folder.lists.reload()
    assert folder.lists.entries() == [Principal("a", ("client",), (Credential("jebp", A, {"fingerprint": A}),))]
    assert B in caplog.text


@pytest.mark.parametrize("bad", ["nobody", "A" * 64, "a" * 63, "a" * 65, "g" * 64, f"{A},{B}"])
@pytest.mark.parametrize("name", ["client_fingerprints", "client_admin_rights"])
def test_a_line_that_is_none_is_named_and_what_was_known_still_holds(name: str, bad: str) -> None:
    folder = Folder(client_fingerprints=f"{A} a\n")
    folder.lists.reload()
    folder.write(name, f"# comment\n{B}\n{bad}\n")
    with pytest.raises(ConfigError, match=rf"conf/{name}, line 3"):
        folder.lists.reload()
    assert list(folder.lists.clients) == [A]


def test_a_file_that_is_not_utf_8_is_named() -> None:
    folder = Folder()
    folder.files.replace_file("conf/client_fingerprints", b"\xff\n")
    with pytest.raises(ConfigError, match="client_fingerprints is not UTF-8"):
        folder.lists.reload()


def test_changing_a_client_keeps_comments_and_order() -> None:
    folder = Folder(
        client_fingerprints=f"# head\n{A} a\n\n# the sensors\n{B} b\n# end\n", client_admin_rights=f"# few\n{B}\n"
    )
    folder.lists.put(ClientEntry(C, "new", False))
    folder.lists.put(ClientEntry(A, "renamed", True))
    folder.lists.put(ClientEntry(B, "b", False))
    assert folder.read("client_fingerprints") == f"# head\n{A} renamed\n\n# the sensors\n{B} b\n# end\n{C} new\n"
    assert folder.read("client_admin_rights") == f"# few\n{A}\n"
    assert folder.lists.clients[A] == ClientEntry(A, "renamed", True)
    folder.lists.remove(A)
    assert folder.read("client_fingerprints") == f"# head\n\n# the sensors\n{B} b\n# end\n{C} new\n"
    assert folder.read("client_admin_rights") == "# few\n"
    assert A not in folder.lists.clients


def test_a_client_that_stands_there_twice_is_put_and_removed_once_for_all() -> None:
    folder = Folder(client_fingerprints=f"{A} first\n{A}\tsecond\n")
    folder.lists.put(ClientEntry(A, "one", False))
    assert folder.read("client_fingerprints") == f"{A} one\n"
    folder.write("client_fingerprints", f"{A} first\n{A}\tsecond\n")
    folder.lists.remove(A)
    assert folder.read("client_fingerprints") == ""


@pytest.mark.parametrize(
    "name", ["", "  ", "a\nb", "a\x00", "a\u2028b", "role:admin", "*", "a b", "a/b", "{name}", " a"]
)
def test_a_client_name_that_no_principal_may_have_is_refused(name: str) -> None:
    folder = Folder(client_fingerprints=f"{A} a\n")
    with pytest.raises(ConfigError):
        folder.lists.put(ClientEntry(B, name, False))
    with pytest.raises(ConfigError):
        folder.lists.put(ClientEntry("no fingerprint", "b", False))
    assert folder.read("client_fingerprints") == f"{A} a\n"


def test_real_files_are_replaced_and_never_half_written(tmp_path: Path) -> None:
    lists = AccessLists(LocalFiles(), str(tmp_path / "conf"))
    lists.put(ClientEntry(A, "a", True))
    assert sorted(path.name for path in (tmp_path / "conf").iterdir()) == ["client_admin_rights", "client_fingerprints"]
    again = AccessLists(LocalFiles(), str(tmp_path / "conf"))
    again.reload()
    assert again.clients == lists.clients


# -- topics ----------------------------------------------------------------------------------------------------------


def test_topics_are_read_as_people_write_them() -> None:
    folder = Folder(topics="# topics\nnews\n a/b  3\nold papers\nold papers 2\ngröße 1\n100%\n")
    assert folder.lists.read_topics() == {"news": 1, "a/b": 3, "old papers": 2, "größe": 1, "100%": 1}


@pytest.mark.parametrize(
    ("line", "says"), [("news 0", "partitions"), ("news 1025", "partitions"), ("a,b", "comma"), ("x" * 250, "249")]
)
def test_a_topic_that_cannot_be_is_named_by_its_line(line: str, says: str) -> None:
    folder = Folder(topics=f"news\n\n{line}\n")
    with pytest.raises(ConfigError, match=rf"conf/topics, line 3: .*{says}"):
        folder.lists.read_topics()


@given(st.dictionaries(st.text(min_size=1, max_size=12).filter(is_topic_name), st.integers(1, 1024), max_size=4))
def test_every_topic_name_comes_back_from_the_list(topics: dict[str, int]) -> None:
    folder = Folder()
    folder.lists.write_topics(topics.items())
    assert folder.lists.read_topics() == topics


@pytest.mark.parametrize(
    "name", ["#1", " a", "a ", "a  b", "%20", "%2520", "a 5", "7", "a\u2028b", "\xa0", "\u3000a", " ", "a\u2029", "%"]
)
def test_names_that_a_line_cannot_hold_as_they_are_come_back(name: str) -> None:
    folder = Folder()
    folder.lists.write_topics([(name, 2), ("other", 1)])
    assert folder.lists.read_topics() == {name: 2, "other": 1}
    assert len(folder.read("topics").splitlines()) == 2


def test_the_list_of_topics_keeps_comments_order_and_what_is_just_being_added() -> None:
    folder = Folder(topics="# ours\nb 2\n\n# theirs\na\ngone\n")
    folder.lists.write_topics([("a", 1), ("b", 2), ("c", 1)])
    assert folder.read("topics") == "# ours\nb 2\n\n# theirs\na 1\nc 1\n"
    folder.write("topics", folder.read("topics") + "by-hand 4\n")
    folder.lists.write_topics([("a", 5), ("c", 1), ("d", 1)])
    assert folder.read("topics") == "# ours\n\n# theirs\na 5\nc 1\nby-hand 4\nd 1\n"
    folder.lists.write_topics([("a", 5), ("by-hand", 4)])
    folder.lists.write_topics([("a", 5)])
    assert folder.read("topics") == "# ours\n\n# theirs\na 5\n"


@pytest.mark.parametrize("fault", [("pwrite", "topics.new"), ("flush_folder", "conf")])
def test_a_list_of_topics_that_could_not_be_written_keeps_no_topic_that_was_removed(fault: tuple[str, str]) -> None:
    files = FaultyFiles()
    lists = AccessLists(files, "conf")
    lists.write_topics([("kept", 1), ("gone", 2)])
    operation, suffix = fault
    for topics in ([("kept", 1), ("new", 1)], [("kept", 1)]):
        files.fail(operation, errno.ENOSPC, suffix=suffix)
        with pytest.raises(OSError, match="No space left"):
            lists.write_topics(topics)
    files.replace_file("conf/topics", files.read_file("conf/topics") + b"by-hand 4\n")
    lists.write_topics([("kept", 1)])
    assert lists.read_topics() == {"kept": 1, "by-hand": 4}


def test_a_client_keeps_the_name_that_it_has_although_nobody_may_be_called_so_any_more() -> None:
    folder = Folder(client_fingerprints=f"{A} sensor  7\n")
    folder.lists.reload()
    folder.lists.put(ClientEntry(A, "sensor  7", True))
    assert folder.lists.clients[A] == ClientEntry(A, "sensor  7", True)
    with pytest.raises(ConfigError, match="'sensor  8' is no name"):
        folder.lists.put(ClientEntry(A, "sensor  8", True))
