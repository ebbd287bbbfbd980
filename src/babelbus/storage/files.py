"""The only calls to the operating system's files: everything that storage reads or makes durable goes through here.

`FileSystem` is what the rest of storage knows; `LocalFiles` is the real one. Tests put a faulty one in its place
(lost, reordered and failed writes, full disks), so that a crash can be repeated from a seed
(docs/design/reliability.md, fault matrix).
"""

import contextlib
import errno
import fcntl
import fnmatch
import os
import shutil
from collections.abc import Sequence
from typing import Protocol

from babelbus.errors import StorageError
from babelbus.storage.errors import DiskError, DiskFullError, FolderLockedError, TooManyFilesError

FILE_MODE = 0o600
FOLDER_MODE = 0o700
"""Events are for those who may read them over a protocol, not for every user of the machine."""
FULL_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def disk_error(error: OSError, doing: str) -> StorageError:
    """Return the error of ours that stands for `error`, raised while `doing` (a few words that name the file)."""
    if error.errno in FULL_DISK_ERRNOS:
        return DiskFullError(f"{doing}: {error.strerror}")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return TooManyFilesError(f"{doing}: {error.strerror}")
    return DiskError(f"{doing}: {error.strerror or error}")


class File(Protocol):
    """An open file. Positions and sizes are bytes; every method may raise `OSError`."""

    def pwrite(self, data: bytes | bytearray | memoryview, position: int) -> None:
        """Write all of `data` at `position`, however many system calls that takes."""

    def pread(self, size: int, position: int) -> bytes:
        """Read up to `size` bytes; fewer only at the end of the file."""

    def truncate(self, size: int) -> None:
        """Set the size of the file; new bytes are zeros."""

    def flush(self) -> None:
        """Return when the file's bytes and its size survive a loss of power."""

    def size(self) -> int:
        """Return the size of the file."""

    def close(self) -> None:
        """Close the descriptor; the system writes what was not flushed."""


class FileSystem(Protocol):
    """The folders and files below a data folder. Every method may raise `OSError`."""

    def open(self, path: str, *, create: bool = False, write: bool = True) -> File:
        """Open a file; `create` makes it when it is missing."""

    def read_file(self, path: str) -> bytes:
        """Return the whole content of a small file."""

    def replace_file(self, path: str, content: bytes, *, mode: int = FILE_MODE) -> None:
        """Replace the file by one with `content`, durably; a crash leaves the old file or the new one."""

    def make_folder(self, path: str) -> None:
        """Build a folder and those above it, durably; it may be there."""

    def close_to_others(self, path: str, names: Sequence[str], *, mode: int = FOLDER_MODE) -> None:
        """Set the modes of a folder and of what is in it, so that no other user reads a file there.

        `mode` is that of the folder itself; `names` are the entries of it that are set, as for a shell (`db.sqlite*`).
        """

    def list_folder(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; a missing folder is an empty one."""

    def exists(self, path: str) -> bool:
        """Return whether there is a file or folder of this name."""

    def rename(self, source: str, target: str) -> None:
        """Return a file or folder another name, in the place of what had it; durable after `flush_folder` of both."""

    def unlink(self, path: str) -> None:
        """Remove a file; it may be missing."""

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all in it."""

    def flush_folder(self, path: str) -> None:
        """Return when the names in the folder survive a loss of power."""

    def lock(self, path: str) -> File:
        """Lock the lock file of a data folder for this process, until the file is closed or the process ends.

        Raises:
            FolderLockedError: another process has it.
        """


class LocalFile:
    """A file of this machine."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def pwrite(self, data: bytes | bytearray | memoryview, position: int) -> None:
        """Write all of `data` at `position`, however many system calls that takes."""
        size = len(data)
        written = os.pwrite(self._descriptor, data, position)
        while written < size:  # a disk that fills up, or a signal, cuts a write short
            rest = memoryview(data)[written:]
            written += os.pwrite(self._descriptor, rest, position + written)

    def pread(self, size: int, position: int) -> bytes:
        """Read up to `size` bytes; fewer only at the end of the file."""
        data = os.pread(self._descriptor, size, position)
        if len(data) == size or not data:
            return data
        parts, missing = [data], size - len(data)
        while missing:
            data = os.pread(self._descriptor, missing, position + size - missing)
            if not data:
                break
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def truncate(self, size: int) -> None:
        """Set the size of the file; new bytes are zeros."""
        os.ftruncate(self._descriptor, size)

    def flush(self) -> None:
        """Return when the file's bytes and its size survive a loss of power."""
        os.fdatasync(self._descriptor)

    def size(self) -> int:
        """Return the size of the file."""
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Close the descriptor; the system writes what was not flushed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LocalFiles:
    """The files of this machine."""

    def open(self, path: str, *, create: bool = False, write: bool = True) -> File:
        """Open a file; `create` makes it when it is missing."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0) | os.O_CLOEXEC
        return LocalFile(os.open(path, flags, FILE_MODE))

    def share(self, path: str) -> int:
        """Open a file to be read by another process; return the descriptor, which the caller closes."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_file(self, path: str) -> bytes:
        """Return the whole content of a small file."""
        file = self.open(path, write=False)  # half the system calls of Python's `open`: a start reads many files
        try:
            return file.pread(file.size(), 0)
        except OSError as error:
            error.filename = path  # which only the opening of a file names
            raise
        finally:
            file.close()

    def replace_file(self, path: str, content: bytes, *, mode: int = FILE_MODE) -> None:
        """Replace the file by one with `content`, durably; a crash leaves the old file or the new one."""
        temporary = f"{path}.new"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            os.fchmod(descriptor, mode)  # a leftover of an earlier crash keeps its own mode otherwise
            LocalFile(descriptor).pwrite(content, 0)
            os.fdatasync(descriptor)
        except OSError:
            self.unlink(temporary)  # on a full disk it would stand in the way
            raise
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        self.flush_folder(os.path.dirname(path))

    def make_folder(self, path: str) -> None:
        """Build a folder and those above it, durably; it may be there."""
        if os.path.isdir(path):
            return
        parent = os.path.dirname(os.path.abspath(path))
        self.make_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, FOLDER_MODE)
        self.flush_folder(parent)

    def close_to_others(self, path: str, names: Sequence[str], *, mode: int = FOLDER_MODE) -> None:
        """Set the modes of a folder and of all below it; see `FileSystem`.

        A folder that has its mode is not looked into: everything below was made, or set right, for the mode it has. So
        the folder itself comes last, and a start after a crash begins again.
        """
        if os.stat(path).st_mode & 0o777 == mode:
            return
        with os.scandir(path) as entries:
            ours = [entry for entry in entries if any(fnmatch.fnmatchcase(entry.name, name) for name in names)]
        for entry in ours:
            if entry.is_file(follow_symlinks=False):
                os.chmod(entry.path, FILE_MODE)
            elif entry.is_dir(follow_symlinks=False):
                for folder, _, _ in os.walk(entry.path):
                    os.chmod(folder, FOLDER_MODE)
        os.chmod(path, mode)

    def list_folder(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; a missing folder is an empty one."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def exists(self, path: str) -> bool:
        """Return whether there is a file or folder of this name."""
        return os.path.lexists(path)

    def rename(self, source: str, target: str) -> None:
        """Return a file or folder another name, in the place of what had it; durable after `flush_folder` of both."""
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        """Remove a file; it may be missing."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all in it."""
        if os.path.isdir(path):
            shutil.rmtree(path)

    def flush_folder(self, path: str) -> None:
        """Return when the names in the folder survive a loss of power."""
        descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lock(self, path: str) -> File:
        """Lock the lock file of a data folder; the error names the process that has it; see `FileSystem`."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise OSError(error.errno, error.strerror, path) from None
            raise FolderLockedError(
                f"{os.path.dirname(path)} is in use by process {owner or 'unknown'}; one process owns a data folder:"
                " stop that process, or name another folder"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return LocalFile(descriptor)
