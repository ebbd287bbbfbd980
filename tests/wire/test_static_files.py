"""Files by the paths of URLs: what is given, what is not, and what a client has already."""

import os
from pathlib import Path

import pytest

from babelbus.wire.http.static_files import FileRefusedError, Files, content_type_of, has_current

CHANGED = 1_700_000_000  # Tue, 14 Nov 2023 22:13:20 GMT
TAG = '"tag"'


@pytest.fixture
def files(tmp_path: Path) -> Files:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "root-too").mkdir()
    (tmp_path / "root-too" / "secret").write_text("secret")
    (root / "index.html").write_text("home")
    (root / "sub" / "index.html").write_text("sub")
    (root / "a b+c.js").write_text("1")
    (root / ".hidden").write_text("secret")
    (root / "inside").symlink_to(root / "a b+c.js")
    (root / "outside").symlink_to(tmp_path / "secret")
    (root / "beside").symlink_to(tmp_path / "root-too")
    (root / "loop").symlink_to(root / "loop")
    os.mkfifo(root / "pipe")
    (root / "full").write_bytes(bytes(100))
    (root / "large").write_bytes(bytes(101))
    return Files(str(root), bytes_max=100)


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("/", b"home"),
        ("", b"home"),
        ("/index.html", b"home"),
        ("//index.html", b"home"),
        ("/sub", b"sub"),
        ("/sub/", b"sub"),
        ("/a b+c.js", b"1"),
        ("/inside", b"1"),
        ("/full", bytes(100)),
    ],
)
def test_a_path_gives_its_file_or_the_index_of_its_folder(files: Files, path: str, data: bytes) -> None:
    found = files.read(path)
    assert found is not None
    assert found.data == data


@pytest.mark.parametrize(
    "path",
    [
        *("/../secret", "/sub/../../secret", "/..", "/.hidden", "/./index.html", "/..\\secret", "/sub\\..\\..\\secret"),
        *("/outside", "/beside/secret", "/loop", "/pipe", "/missing", "/index.html/", "/index.html/x", "/x\0y", "/\0"),
        "/" + "x" * 5000,
        "/" + "x/" * 3000,
    ],
)
def test_nothing_outside_of_the_folder_is_given_and_nothing_hidden(files: Files, path: str) -> None:
    assert files.read(path) is None


def test_with_always_a_path_of_nothing_gives_the_index_of_the_root(files: Files) -> None:
    found = files.read("/outside", always=True)
    assert found is not None
    assert found.data == b"home"
    assert files.read("/../secret", always=True) is None


def test_a_file_that_is_too_large_is_refused(files: Files) -> None:
    with pytest.raises(FileRefusedError, match="101 bytes"):
        files.read("/large")


def test_what_the_client_has_is_not_read_until_it_changes(files: Files, tmp_path: Path) -> None:
    found = files.read("/sub/")
    assert found is not None
    for asked in ({"if-none-match": found.tag}, {"if-modified-since": found.changed}):
        again = files.read("/sub/", asked=asked)
        assert again is not None
        assert (again.unchanged, again.data, again.tag) == (True, b"", found.tag)
    path = tmp_path / "root" / "sub" / "index.html"
    path.write_text("new")
    os.utime(path, (CHANGED, CHANGED))
    again = files.read("/sub/", asked={"if-none-match": found.tag})
    assert again is not None
    assert (again.unchanged, again.data, again.changed) == (False, b"new", "Tue, 14 Nov 2023 22:13:20 GMT")


@pytest.mark.parametrize(
    ("asked", "current"),
    [
        ({}, False),
        ({"if-none-match": TAG}, True),
        ({"if-none-match": f"W/{TAG}"}, True),
        ({"if-none-match": f'"other", {TAG}'}, True),
        ({"if-none-match": "*"}, True),
        ({"if-none-match": '"other"'}, False),
        ({"if-none-match": "tag"}, False),
        ({"if-modified-since": "Tue, 14 Nov 2023 22:13:20 GMT"}, True),
        ({"if-modified-since": "Tue, 14 Nov 2023 22:13:19 GMT"}, False),
        ({"if-modified-since": "Tuesday, 14-Nov-23 22:13:20 GMT"}, True),
        ({"if-modified-since": "yesterday"}, False),
        ({"if-modified-since": "Tue, 99 Nov 99999 99:99:99 GMT"}, False),
        ({"if-modified-since": ""}, False),
        ({"if-none-match": '"other"', "if-modified-since": "Tue, 14 Nov 2023 22:13:20 GMT"}, False),
    ],
)
def test_a_client_has_what_its_tag_or_else_its_date_says(asked: dict[str, str], current: bool) -> None:
    assert has_current(asked, TAG, CHANGED) is current


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.html", "text/html; charset=utf-8"),
        ("a.JS", "text/javascript; charset=utf-8"),
        ("a.png", "image/png"),
        ("a.wasm", "application/wasm"),
        ("a", "application/octet-stream"),
        ("a.unknown-type", "application/octet-stream"),
    ],
)
def test_the_name_says_the_type(name: str, kind: str) -> None:
    assert content_type_of(name) == kind
