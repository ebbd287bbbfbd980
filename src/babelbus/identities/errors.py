"""Why a proof of identity is not accepted, and why a file of secrets is not."""

from babelbus.errors import BabelbusError


class InvalidProofError(BabelbusError):
    """The proof is malformed, wrong or expired. The text names no secret, and no reason that helps to guess."""


class MisfitProofError(InvalidProofError):
    """The proof is genuine, and not for here and now: expired, not valid yet, for others, without a claim. No guess."""


class UnknownKeyError(MisfitProofError):
    """The JWT names a key that is not in the key set yet; the key set is fetched in the background."""

    retriable = True


class TooManyProofsError(BabelbusError):
    """Too many passwords wait to be checked; nothing was checked."""

    retriable = True


class CredentialError(BabelbusError):
    """A stored credential is damaged, or asks for more than the limits; the text names the credential's id."""


class KeyFileError(BabelbusError):
    """A file of secrets cannot be read or made, or others may read it; the text says what to do."""
