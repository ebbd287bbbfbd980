"""Texts of errors: clients read them, and learn nothing about the machine from them."""

import os

import pytest

from babelbus.errors import StorageError
from babelbus.storage.errors import DiskError
from babelbus.storage.files import disk_error


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("read of 5 bytes at 0 of /srv/bus/topics/t/0/1.log: no", "read of 5 bytes at 0 of topics/t/0/1.log: no"),
        ("write of /my data/x/topics/a b/0/1.log", "write of topics/a b/0/1.log"),
        ("'/srv/bus/state/checkpoint' is damaged", "'state/checkpoint' is damaged"),
        ("writing /srv/bus/groups.0", "writing groups.0"),
        ("flush of /srv/bus/db.sqlite.ends", "flush of db.sqlite.ends"),
        ("sqlite:////srv/bus/db.sqlite: no room", "sqlite:///db.sqlite: no room"),
        ("sqlite:////srv/events.db: no room", "sqlite:///events.db: no room"),
        ("topic 'a/topics/b' has no partition 1", "topic 'a/topics/b' has no partition 1"),
        ("postgresql://host/topics/x", "postgresql://host/topics/x"),
    ],
)
def test_an_error_of_the_store_does_not_say_where_the_data_folder_is(text: str, told: str) -> None:
    assert str(StorageError(text)) == told
    assert str(DiskError(text)) == told
    error = disk_error(OSError(5, os.strerror(5)), text)
    assert str(error) == f"{told}: Input/output error"
