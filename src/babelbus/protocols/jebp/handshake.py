"""The nine messages before the first request, for both sides: bytes in, bytes out (specification, section 2).

    1 S protocol and version    2 C public key        3 S public key     4 C nonce     5 S nonce
    6 C random bytes, sealed    7 S the same, plain   8 S certificate, sealed          9 C certificate, sealed

After message 9 the server is silent on success. The time limit (10 s, DECISION 13) belongs to whoever has the clock.
"""

import hashlib
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from hmac import compare_digest
from typing import Final

import msgspec
import nacl.bindings

from babelbus.errors import RemoteProtocolError
from babelbus.protocols.jebp.box import KEY_BYTES, NONCE_BYTES, Opener, Sealer, check_nonces, shared_key
from babelbus.protocols.jebp.frames import (
    FRAME_BYTES_MAX,
    HANDSHAKE_BYTES_MAX,
    HANDSHAKE_BYTES_MAX_BARE,
    FrameReader,
    encode_frame,
)
from babelbus.protocols.jebp.identity import CERTIFICATE_BYTES, SIGNATURE_BYTES, Identity, fingerprint, is_signature

VERSION: Final = b"jebp/1.1"
TIMEOUT_SECONDS: Final = 10.0

_VERSION: Final = re.compile(rb"jebp/([0-9]{1,9})\.([0-9]{1,9})")
_MAJOR: Final = 1
_SERVER_SIGNS: Final = b"jebp server"
_CLIENT_SIGNS: Final = b"jebp client"
_RANDOM_BYTES: Final = 32
_RANDOM_BYTES_MAX: Final = 512
_BARE_CERTIFICATE_BYTES_MAX: Final = 8_192


class UntrustedPeerError(RemoteProtocolError):
    """The peer proved who it is, and we do not want to speak to it."""

    def __init__(self, fingerprint: str) -> None:
        super().__init__(f"the peer with the fingerprint {fingerprint} is not trusted")
        self.fingerprint = fingerprint


class Established(msgspec.Struct, frozen=True):
    """What a finished handshake leaves.

    Attributes:
        fingerprint: of the peer's certificate. The server's session decides about it before it looks at `surplus`.
        certificate: what the peer showed; proven unless bare certificates are in use.
        minor: the server's minor version.
        sealer: for what this side says, at its place in the count.
        opener: for what the peer says; return it to a `ServerDecoder` or `ClientDecoder`.
        surplus: bytes that arrived behind the handshake; the first data of that decoder.
    """

    fingerprint: str
    certificate: bytes
    minor: int
    sealer: Sealer
    opener: Opener
    surplus: bytes


class _Handshake(ABC):
    """What both sides share: a script of steps that each frame of the peer takes further. Spent once it has raised."""

    def __init__(
        self,
        identity: Identity,
        *,
        bare_certificates: bool,
        frame_bytes_max: int,
        secret_key: bytes | None,
        nonce: bytes | None,
    ) -> None:
        self.established: Established | None = None
        self._identity = identity
        self._bare = bare_certificates
        self._frame_bytes_max = frame_bytes_max
        # Fresh per connection: a key that leaks later must not open old traffic (DECISION 7).
        self._secret_key = secret_key if secret_key is not None else secrets.token_bytes(KEY_BYTES)
        self._public_key = nacl.bindings.crypto_scalarmult_base(self._secret_key)
        self._nonce = nonce if nonce is not None else secrets.token_bytes(NONCE_BYTES)
        self._reader = FrameReader(HANDSHAKE_BYTES_MAX_BARE if bare_certificates else HANDSHAKE_BYTES_MAX)
        self._digest = hashlib.sha256()  # of the contents of messages 1 to 5, which both certificates sign
        self._out: list[bytes] = []
        self._error: RemoteProtocolError | None = None
        self._steps = self._run()
        next(self._steps)

    @property
    def done(self) -> bool:
        """True when `established` is there; more bytes belong to its decoder."""
        return self.established is not None

    def begin(self) -> bytes:
        """Return the bytes to send when the connection is there: the server speaks first, the client's are empty."""
        return self._take_out()

    def receive_data(self, data: bytes | bytearray | memoryview) -> bytes:
        """Take bytes of the peer, cut anywhere, and return the bytes to send, perhaps none.

        Raises:
            RemoteProtocolError: the peer broke the protocol; send nothing and close (section 6).
            UntrustedPeerError: the client does not trust the server's certificate; the same.
        """
        assert self.established is None, "the handshake is over: these bytes belong to the decoder"
        if self._error is not None:
            raise self._error
        self._reader.receive_data(data)
        try:
            while (content := self._reader.next_frame()) is not None:
                self._steps.send(content)
        except RemoteProtocolError as error:
            self._error = error
            raise
        except StopIteration as end:
            self.established = end.value
        return self._take_out()

    @abstractmethod
    def _run(self) -> Generator[None, bytes, Established]:
        """Go through the nine messages: each frame of the peer is sent in, the last step returns what they left."""

    def _take_out(self) -> bytes:
        out = b"".join(self._out)
        self._out.clear()
        return out

    def _say(self, content: bytes) -> None:
        """Send one of messages 1 to 5."""
        self._digest.update(content)
        self._out.append(encode_frame(content))

    def _hear(self, content: bytes, size: int, what: str) -> bytes:
        """Take one of messages 2 to 5, whose size is fixed."""
        if len(content) != size:
            raise RemoteProtocolError(f"{what} of {len(content)} bytes, not {size}")
        self._digest.update(content)
        return content

    def _boxes(self, key: bytes, peer_nonce: bytes) -> tuple[Sealer, Opener]:
        check_nonces(self._nonce, peer_nonce)
        return Sealer(key, self._nonce, frame_bytes_max=self._frame_bytes_max), Opener(key, peer_nonce)

    def _own_certificate(self, signer: bytes) -> bytes:
        """Return the content of message 8 or 9."""
        if self._bare:
            return self._identity.certificate
        return self._identity.certificate + self._identity.sign(signer + self._digest.digest())

    def _peer_certificate(self, content: bytes, signer: bytes) -> bytes:
        """Read message 8 or 9: a key and the proof that the peer owns it and sees this same handshake (DECISION 10)."""
        if self._bare:
            if not 1 <= len(content) <= _BARE_CERTIFICATE_BYTES_MAX:
                raise RemoteProtocolError(f"certificate of {len(content)} bytes, limit {_BARE_CERTIFICATE_BYTES_MAX}")
            return content
        if len(content) != CERTIFICATE_BYTES + SIGNATURE_BYTES:
            raise RemoteProtocolError(
                f"certificate message of {len(content)} bytes, not {CERTIFICATE_BYTES + SIGNATURE_BYTES}"
            )
        certificate, signature = content[:CERTIFICATE_BYTES], content[CERTIFICATE_BYTES:]
        if not is_signature(certificate, signer + self._digest.digest(), signature):
            raise RemoteProtocolError("the proof of the certificate is not a signature of this handshake")
        return certificate

    def _finish(self, certificate: bytes, minor: int, sealer: Sealer, opener: Opener) -> Established:
        return Established(
            fingerprint=fingerprint(certificate),
            certificate=certificate,
            minor=minor,
            sealer=sealer,
            opener=opener,
            surplus=self._reader.take_rest(),
        )


class ServerHandshake(_Handshake):
    """The server's side. Whether the client of `established.fingerprint` may come in is for the session to decide.

    Args:
        identity: the server's key.
        version: what message 1 says.
        bare_certificates: the option `jebp_bare_certificates`, for both sides' certificates.
        frame_bytes_max: largest frame content that will be sent after the handshake.
        secret_key: X25519 secret key, only for tests with known bytes.
        nonce: start nonce, only for tests with known bytes.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        version: bytes = VERSION,
        bare_certificates: bool = False,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        secret_key: bytes | None = None,
        nonce: bytes | None = None,
    ) -> None:
        self._version = version
        self._minor = _read_version(version)
        super().__init__(
            identity,
            bare_certificates=bare_certificates,
            frame_bytes_max=frame_bytes_max,
            secret_key=secret_key,
            nonce=nonce,
        )

    def _run(self) -> Generator[None, bytes, Established]:
        self._say(self._version)
        peer_key = self._hear((yield), KEY_BYTES, "public key")
        key = shared_key(self._secret_key, peer_key)
        self._say(self._public_key)
        peer_nonce = self._hear((yield), NONCE_BYTES, "nonce")
        sealer, opener = self._boxes(key, peer_nonce)
        self._say(self._nonce)
        challenge = opener.open((yield))
        if not 1 <= len(challenge) <= _RANDOM_BYTES_MAX:
            raise RemoteProtocolError(f"random part of {len(challenge)} bytes, limit {_RANDOM_BYTES_MAX}")
        # The one place where opened bytes go out in the clear: once, and never again on this connection (DECISION 9a).
        self._out.append(encode_frame(challenge))
        self._out.append(bytes(sealer.seal_parts((self._own_certificate(_SERVER_SIGNS),))))
        certificate = self._peer_certificate(opener.open((yield)), _CLIENT_SIGNS)
        return self._finish(certificate, self._minor, sealer, opener)


class ClientHandshake(_Handshake):
    """The client's side.

    Args:
        identity: the client's key.
        trust: told the server's fingerprint, says whether to go on; our own certificate is sent only then.
        bare_certificates: the option `jebp_bare_certificates`, for both sides' certificates.
        frame_bytes_max: largest frame content that will be sent after the handshake.
        secret_key: X25519 secret key, only for tests with known bytes.
        nonce: start nonce, only for tests with known bytes.
        random_bytes: content of message 6, only for tests with known bytes.
    """

    def __init__(
        self,
        identity: Identity,
        trust: Callable[[str], bool],
        *,
        bare_certificates: bool = False,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        secret_key: bytes | None = None,
        nonce: bytes | None = None,
        random_bytes: bytes | None = None,
    ) -> None:
        self._trust = trust
        self._random_bytes = random_bytes if random_bytes is not None else secrets.token_bytes(_RANDOM_BYTES)
        super().__init__(
            identity,
            bare_certificates=bare_certificates,
            frame_bytes_max=frame_bytes_max,
            secret_key=secret_key,
            nonce=nonce,
        )

    def _run(self) -> Generator[None, bytes, Established]:
        version = yield
        minor = _read_version(version)
        self._digest.update(version)
        self._say(self._public_key)
        peer_key = self._hear((yield), KEY_BYTES, "public key")
        key = shared_key(self._secret_key, peer_key)
        self._say(self._nonce)
        peer_nonce = self._hear((yield), NONCE_BYTES, "nonce")
        sealer, opener = self._boxes(key, peer_nonce)
        self._out.append(bytes(sealer.seal_parts((self._random_bytes,))))
        if not compare_digest((yield), self._random_bytes):
            raise RemoteProtocolError("the server did not give the random bytes back")
        certificate = self._peer_certificate(opener.open((yield)), _SERVER_SIGNS)
        if not self._trust(fingerprint(certificate)):
            raise UntrustedPeerError(fingerprint(certificate))
        self._out.append(bytes(sealer.seal_parts((self._own_certificate(_CLIENT_SIGNS),))))
        return self._finish(certificate, minor, sealer, opener)


def _read_version(content: bytes) -> int:
    """Return the minor number of message 1 (DECISION 5).

    Raises:
        RemoteProtocolError: it is not jebp, or not of our major number.
    """
    match = _VERSION.fullmatch(content)
    if match is None or int(match[1]) != _MAJOR:
        raise RemoteProtocolError(f"the server speaks {content[:32]!r}, not jebp/{_MAJOR}")
    return int(match[2])
