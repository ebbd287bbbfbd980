"""Keys, fingerprints and the file that keeps them."""

import os
from pathlib import Path

import pytest

from babelbus.protocols.jebp.identity import Identity, IdentityError, fingerprint, is_signature

CLIENT_FINGERPRINT = "7db0b01f39d179aacf7b03dbd7dd9d71f641598bed40fb9839d3c1e1117e666f"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_seed_of_the_specification_gives_its_certificate_and_fingerprint() -> None:
    identity = Identity(b"\x43" * 32)
    assert identity.certificate.hex() == "22fc297792f0b6ffc0bfcfdb7edb0c0aa14e025a365ec0e342e86e3829cb74b6"
    assert identity.fingerprint == fingerprint(identity.certificate) == CLIENT_FINGERPRINT


def test_a_saved_key_loads_as_the_same_identity_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    identity = Identity.generate()
    identity.save(tmp_path / "key", name="my\nconsole")
    assert Identity.load(tmp_path / "key").fingerprint == identity.fingerprint
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["key"]


def test_the_file_is_text_with_one_line_that_counts(tmp_path: Path) -> None:
    Identity(b"\x43" * 32).save(tmp_path / "key", name="console")
    assert (tmp_path / "key").read_text() == (
        "# Babelbus identity: console\n"
        f"# fingerprint: {CLIENT_FINGERPRINT}\n"
        "jebp-ed25519-seed 4343434343434343434343434343434343434343434343434343434343434343\n"
    )


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    first = Identity.generate()
    first.save(tmp_path / "key")
    with pytest.raises(IdentityError, match="exists already"):
        Identity.generate().save(tmp_path / "key")
    assert Identity.load(tmp_path / "key").fingerprint == first.fingerprint
    assert os.listdir(tmp_path) == ["key"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match=r"cannot write the key file .*nowhere/key"):
        Identity.generate().save(tmp_path / "nowhere" / "key")
    with pytest.raises(IdentityError, match=r"cannot read the key file .*nowhere/key"):
        Identity.load(tmp_path / "nowhere" / "key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.load(write(tmp_path / "key", f"jebp-ed25519-seed {'43' * 32}\n", mode))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only a comment\n",
        "43" * 32,
        f"other-seed {'43' * 32}\n",
        f"jebp-ed25519-seed {'43' * 31}\n",
        f"jebp-ed25519-seed {'43' * 33}\n",
        f"jebp-ed25519-seed {'zz' * 32}\n",
        f"jebp-ed25519-seed {'43' * 32}\n" * 2,
        "#" * 5000,
    ],
)
def test_a_file_that_does_not_hold_one_key_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(IdentityError, match=r"key") as caught:
        Identity.load(write(tmp_path / "key", text))
    assert "4343" not in str(caught.value)


def test_a_repr_does_not_show_the_secret() -> None:
    assert repr(Identity(b"\x43" * 32)) == f"Identity({CLIENT_FINGERPRINT})"


def test_only_the_owner_signs_and_only_that_message() -> None:
    identity, other = Identity(b"\x43" * 32), Identity(b"\x44" * 32)
    signature = identity.sign(b"message")
    assert is_signature(identity.certificate, b"message", signature)
    assert not is_signature(other.certificate, b"message", signature)
    assert not is_signature(identity.certificate, b"massage", signature)
    assert not is_signature(identity.certificate, b"message", signature[:-1])
    assert not is_signature(identity.certificate[:-1], b"message", signature)


def test_a_seed_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="31 bytes"):
        Identity(bytes(31))
