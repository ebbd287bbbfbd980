"""Notes of the saves of frames that are no streams: each once for a checkpoint and a definition of the pipeline."""

import hashlib
import os
import secrets

import msgspec

from babelbus.spark.errors import SparkError
from babelbus.spark.pipelines.model import Pipeline
from babelbus.storage.files import LocalFiles


class NoteDamagedError(SparkError):
    """The note of a save cannot be read."""


class _Noted(msgspec.Struct, frozen=True):
    transaction: str
    done: bool = False


def identity(pipeline: Pipeline, sink: str) -> str:
    """Return the identity of a save: it changes with a parameter, a source, a step and the sink.

    The code of Python steps has no influence, nor have the records that there are to read.
    """
    parts = pipeline.sources, pipeline.steps, pipeline.sinks[sink], sorted(pipeline.parameters.items())
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


class Save:
    """One save, as it is noted in the folder of its sink's checkpoint: without that folder the save is done again.

    The note has the transaction, so that a save that was killed goes on with it; and it says when all is done. Where
    the folder is out of reach there is no note: the transaction is of its name, and the bus alone knows what was done.
    """

    def __init__(self, folder: str, identity: str, *, in_reach: bool) -> None:
        self._folder = folder
        self._identity = identity
        self._in_reach = in_reach
        self._path = os.path.join(folder, f"save-{identity}.json")
        self._files = LocalFiles()

    def begin(self) -> str | None:
        """Return the transaction id to save under; `None`: it was done before.

        Raises:
            NoteDamagedError: the note cannot be read.
        """
        if not self._in_reach:
            return f"pipeline {hashlib.sha256(f'{self._folder} {self._identity}'.encode()).hexdigest()[:40]}"
        try:
            noted = msgspec.json.decode(self._files.read_file(self._path), type=_Noted)
        except FileNotFoundError:
            self._files.make_folder(self._folder)
            noted = _Noted(f"pipeline save {secrets.token_hex(16)}")
            self._files.replace_file(self._path, msgspec.json.encode(noted))
        except msgspec.MsgspecError as error:
            raise NoteDamagedError(f"{self._path} is damaged ({error}); without it all is saved once more") from None
        self._noted = noted
        return None if noted.done else noted.transaction

    def end(self) -> None:
        """Record that it is done."""
        if self._in_reach:
            done = msgspec.structs.replace(self._noted, done=True)
            self._files.replace_file(self._path, msgspec.json.encode(done))
