"""Engine `memory`: the same log on files that live in memory, for topics that need not survive the server."""

import errno
import os
from collections.abc import Callable, Sequence

from babelbus.storage.errors import FolderLockedError
from babelbus.storage.files import FILE_MODE, FOLDER_MODE, File


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


class MemoryFile:
    """A file in memory; two opens of one path share its bytes."""

    __slots__ = ("content",)

    def __init__(self, content: bytearray) -> None:
        self.content = content

    def pwrite(self, data: bytes | bytearray | memoryview, position: int) -> None:
        """Write `data` at `position`, with zeros in front of it if the file ends earlier."""
        if position > len(self.content):
            self.content.extend(bytes(position - len(self.content)))
        self.content[position : position + len(data)] = data

    def pread(self, size: int, position: int) -> bytes:
        """Read up to `size` bytes; fewer only at the end of the file."""
        return bytes(memoryview(self.content)[position : position + size])

    def truncate(self, size: int) -> None:
        """Set the size of the file; new bytes are zeros."""
        if size < len(self.content):
            del self.content[size:]
        else:
            self.content.extend(bytes(size - len(self.content)))

    def flush(self) -> None:
        """Return at once: memory is as durable as it gets."""

    def size(self) -> int:
        """Return the size of the file."""
        return len(self.content)

    def close(self) -> None:
        """Return at once: the bytes belong to the file system."""


class _LockFile(MemoryFile):
    """A lock file, which gives the lock back when it is closed."""

    __slots__ = ("_release",)

    def __init__(self, content: bytearray, release: Callable[[], None]) -> None:
        super().__init__(content)
        self._release = release

    def close(self) -> None:
        self._release()


class MemoryFiles:
    """A file system in memory; see `files.FileSystem`. Paths are plain strings with slashes."""

    def __init__(self) -> None:
        self._contents: dict[str, bytearray] = {}
        self._folders: set[str] = set()
        self._locked: set[str] = set()

    def open(self, path: str, *, create: bool = False, write: bool = True) -> File:
        """Open a file; `create` makes it when it is missing."""
        content = self._contents.get(path)
        if content is None:
            if not create:
                raise _missing(path)
            content = self._contents[path] = bytearray()
        return MemoryFile(content)

    def read_file(self, path: str) -> bytes:
        """Return the whole content of a file."""
        content = self._contents.get(path)
        if content is None:
            raise _missing(path)
        return bytes(content)

    def replace_file(self, path: str, content: bytes, *, mode: int = FILE_MODE) -> None:
        """Replace the content of the file."""
        self._contents[path] = bytearray(content)

    def make_folder(self, path: str) -> None:
        """Build a folder and those above it; it may be there."""
        while path and path not in self._folders:
            self._folders.add(path)
            path = path.rpartition("/")[0]

    def close_to_others(self, path: str, names: Sequence[str], *, mode: int = FOLDER_MODE) -> None:
        """Return: other processes do not see the memory."""

    def list_folder(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; a missing folder is an empty one."""
        start = f"{path}/"
        names = [name[len(start) :] for name in (*self._contents, *self._folders) if name.startswith(start)]
        return sorted({name.partition("/")[0] for name in names})

    def exists(self, path: str) -> bool:
        """Return whether there is a file or folder of this name."""
        return path in self._contents or path in self._folders

    def rename(self, source: str, target: str) -> None:
        """Return a file or folder another name, in the place of what had it."""
        if not self.exists(source):
            raise _missing(source)
        for path in list(self._contents):
            if path == source or path.startswith(f"{source}/"):
                self._contents[target + path[len(source) :]] = self._contents.pop(path)
        moved = {path for path in self._folders if path == source or path.startswith(f"{source}/")}
        self._folders = (self._folders - moved) | {target + path[len(source) :] for path in moved}

    def unlink(self, path: str) -> None:
        """Remove a file; it may be missing."""
        self._contents.pop(path, None)

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all in it."""
        for name in [name for name in self._contents if name.startswith(f"{path}/")]:
            del self._contents[name]
        self._folders = {name for name in self._folders if name != path and not name.startswith(f"{path}/")}

    def flush_folder(self, path: str) -> None:
        """Return at once: memory is as durable as it gets."""

    def lock(self, path: str) -> File:
        """Lock a lock file."""
        if path in self._locked:
            raise FolderLockedError(f"{path} is in use")
        self._locked.add(path)
        self.open(path, create=True)
        return _LockFile(self._contents[path], lambda: self._locked.discard(path))
