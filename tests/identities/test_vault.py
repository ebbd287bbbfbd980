"""Sealed secrets and files of keys: who may read them, what is made, and what damage does."""

import os
import stat
from pathlib import Path

import msgspec
import pytest

from babelbus.identities.errors import CredentialError, KeyFileError
from babelbus.identities.key_files import check_key_file, make_key_file, read_key_file, refuse_wide_mode
from babelbus.identities.vault import Vault, make_api_key, secret_of


def test_a_secret_is_read_back_after_a_restart_and_is_not_in_the_credential(tmp_path: Path) -> None:
    folder = str(tmp_path / "conf")
    issued = make_api_key(Vault(folder), 5)
    assert issued.secret.encode() not in msgspec.json.encode(issued.credential)
    assert secret_of(Vault(folder), issued.credential) == issued.secret
    given = make_api_key(Vault(folder), 5, key="old", secret="of an old file")
    assert (given.credential.data["key"], secret_of(Vault(folder), given.credential)) == ("old", "of an old file")


def test_the_key_file_is_made_at_the_first_need_for_its_owner_alone(tmp_path: Path) -> None:
    vault = Vault(str(tmp_path / "conf"))
    with pytest.raises(KeyFileError, match=r"access\.key: No such file"):
        vault.open("a", "")
    assert not os.path.exists(vault.path)
    vault.seal("a", "b")
    assert stat.S_IMODE(os.stat(vault.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "conf").st_mode) == 0o700
    assert os.listdir(tmp_path / "conf") == ["access.key"]


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    vault = Vault(str(tmp_path))
    issued = make_api_key(vault, 0)
    for mode in (0o640, 0o604, 0o644, 0o620):
        os.chmod(vault.path, mode)
        with pytest.raises(
            KeyFileError, match=rf"may be read by others \(mode {mode:o}\); 'chmod 600' it, and replace"
        ):
            secret_of(Vault(str(tmp_path)), issued.credential)


def test_damage_other_keys_and_swapped_secrets_are_noticed(tmp_path: Path) -> None:
    vault = Vault(str(tmp_path / "a"))
    one, two = make_api_key(vault, 0).credential, make_api_key(vault, 0).credential
    swapped = msgspec.structs.replace(one, data={**one.data, "sealed": two.data["sealed"]})
    renamed = msgspec.structs.replace(one, data={**one.data, "key": "of another"})
    cut = msgspec.structs.replace(one, data={**one.data, "sealed": str(one.data["sealed"])[:-4]})
    for credential in (swapped, renamed, cut, msgspec.structs.replace(one, data={})):
        with pytest.raises(CredentialError):
            secret_of(vault, credential)
    other = Vault(str(tmp_path / "b"))
    other.seal("x", "y")
    with pytest.raises(CredentialError, match="cannot be opened"):
        secret_of(other, one)
    for content in ("", "babelbus-access-key 00", "jebp-ed25519-seed " + "00" * 32, "\xff"):
        Path(other.path).write_text(content)
        with pytest.raises(KeyFileError, match="damaged"):
            Vault(str(tmp_path / "b")).seal("x", "y")


def test_a_key_file_is_never_overwritten_and_never_half_there(tmp_path: Path) -> None:
    path = str(tmp_path / "key")
    assert make_key_file(path, b"one")
    assert not make_key_file(path, b"two")
    assert read_key_file(path) == b"one"
    assert os.listdir(tmp_path) == ["key"]
    with pytest.raises(KeyFileError, match="over 2 bytes"):
        read_key_file(path, bytes_max=2)
    with pytest.raises(KeyFileError, match="cannot make"):
        make_key_file(str(tmp_path / "key" / "below"), b"")
    check_key_file(path)
    os.chmod(path, 0o644)
    with pytest.raises(KeyFileError):
        check_key_file(path)
    with pytest.raises(KeyFileError, match="cannot read"):
        check_key_file(f"{path}.not")


def test_a_public_key_may_be_read_by_all(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_text("-----BEGIN PUBLIC KEY-----\n")
    path.chmod(0o644)
    assert read_key_file(str(path), public=True)
    with pytest.raises(KeyFileError):
        read_key_file(str(path))
    path.write_text("-----BEGIN PUBLIC KEY-----\n-----BEGIN EC PRIVATE KEY-----\n")
    with pytest.raises(KeyFileError):
        read_key_file(str(path), public=True)


def test_a_file_of_root_may_be_readable_by_a_group_for_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    def about(mode: int, owner: int) -> os.stat_result:
        return os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    refuse_wide_mode("f", about(0o640, 0))
    for mode, owner in ((0o644, 0), (0o660, 0), (0o640, 1000)):
        with pytest.raises(KeyFileError):
            refuse_wide_mode("f", about(mode, owner))
