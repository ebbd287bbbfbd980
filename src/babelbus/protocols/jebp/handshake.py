"""The nine messages before the first request, for both sides: bytes in, bytes out (specification, section 2).

    1 S protocol and version    2 C public key        3 S public key     4 C nonce     5 S nonce
    6 C random bytes, sealed    7 S the same, plain   8 S certificate, sealed          9 C certificate, sealed

After message 9 the server is silent on success. The time limit (10 s, DECISION 13) belongs to whoever has the clock.
"""

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from hmac import compare_digest
from typing import Final, TypedDict, Unpack

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

VERSION: Final = b"jebp/1.2"
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
    """The result of a handshake.

    Attributes:
        fingerprint: of the peer's certificate. The server's session decides about it before it looks at `surplus`.
        sealer: for the messages of this side, at its place in the count.
        opener: for the messages of the peer; the argument of a `ServerDecoder` or `ClientDecoder`.
        surplus: bytes that arrived behind the handshake; the first data of that decoder.
        minor: the minor number of the server's version, on the client's side.
    """

    fingerprint: str
    sealer: Sealer
    opener: Opener
    surplus: bytes
    minor: int = 0


class HandshakeOptions(TypedDict, total=False):
    """The options of both sides.

    Attributes:
        bare_certificates: the option `jebp_bare_certificates`, for both sides' certificates.
        frame_bytes_max: largest frame content that will be sent after the handshake.
        secret_key: X25519 secret key, only for tests with known bytes.
        nonce: start nonce, only for tests with known bytes.
    """

    bare_certificates: bool
    frame_bytes_max: int
    secret_key: bytes
    nonce: bytes


class _Handshake(ABC):
    """The part that both sides share: a script of steps that each frame of the peer takes further.

    Spent once it has raised.
    """

    def __init__(self, identity: Identity, **options: Unpack[HandshakeOptions]) -> None:
        self.established: Established | None = None
        self._identity = identity
        self._bare = options.get("bare_certificates", False)
        self._frame_bytes_max = options.get("frame_bytes_max", FRAME_BYTES_MAX)
        # Fresh per connection: a key that leaks later must not open old traffic (DECISION 7).
        self._secret_key = options.get("secret_key") or os.urandom(KEY_BYTES)
        self._public_key = nacl.bindings.crypto_scalarmult_base(self._secret_key)
        self._nonce = options.get("nonce") or os.urandom(NONCE_BYTES)
        self._reader = FrameReader(HANDSHAKE_BYTES_MAX_BARE if self._bare else HANDSHAKE_BYTES_MAX)
        self._digest = hashlib.sha256()  # of the contents of messages 1 to 5, which both certificates sign
        self._out: list[bytes] = []
        self._error: RemoteProtocolError | None = None
        self._steps = self._run()
        next(self._steps)

    def begin(self) -> bytes:
        """Return the bytes to send when the connection is there: the server speaks first, the client's are empty."""
        return self._take_out()

    def receive_data(self, data: bytes | bytearray | memoryview) -> bytes:
        """Receive bytes of the peer, cut anywhere, and return the bytes to send, perhaps no bytes.

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
        """Handle the nine messages: each frame of the peer is sent in, the last step returns the result."""

    def _take_out(self) -> bytes:
        out = b"".join(self._out)
        self._out.clear()
        return out

    def _say(self, content: bytes) -> None:
        """Send one of messages 1 to 5."""
        self._digest.update(content)
        self._out.append(encode_frame(content))

    def _hear(self, content: bytes, size: int, what: str) -> bytes:
        """Check one of messages 2 to 5, whose size is fixed, and return it."""
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

    def _finish(self, certificate: bytes, sealer: Sealer, opener: Opener, minor: int = 0) -> Established:
        return Established(fingerprint(certificate), sealer, opener, self._reader.take_rest(), minor)


class ServerHandshake(_Handshake):
    """The server's side. Whether the client of `established.fingerprint` may come in is for the session to decide.

    Args:
        identity: the server's key.
        version: the content of message 1.
        options: see `HandshakeOptions`.
    """

    def __init__(self, identity: Identity, *, version: bytes = VERSION, **options: Unpack[HandshakeOptions]) -> None:
        _check_version(version)
        self._version = version
        super().__init__(identity, **options)

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
        return self._finish(certificate, sealer, opener)


class ClientHandshake(_Handshake):
    """The client's side.

    Args:
        identity: the client's key.
        trust: told the server's fingerprint, says whether to go on; our own certificate is sent only then.
        random_bytes: content of message 6, only for tests with known bytes.
        options: see `HandshakeOptions`.
    """

    def __init__(
        self,
        identity: Identity,
        trust: Callable[[str], bool],
        *,
        random_bytes: bytes | None = None,
        **options: Unpack[HandshakeOptions],
    ) -> None:
        self._trust = trust
        self._random_bytes = random_bytes or os.urandom(_RANDOM_BYTES)
        super().__init__(identity, **options)

    def _run(self) -> Generator[None, bytes, Established]:
        version = yield
        minor = _check_version(version)
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
        return self._finish(certificate, sealer, opener, minor)


def _check_version(content: bytes) -> int:
    """Return the minor number of message 1 (DECISION 5); any is good.

    Raises:
        RemoteProtocolError: it is not jebp, or not of our major number.
    """
    match = _VERSION.fullmatch(content)
    if match is None or int(match[1]) != _MAJOR:
        raise RemoteProtocolError(f"the server speaks {content[:32]!r}, not jebp/{_MAJOR}")
    return int(match[2])
