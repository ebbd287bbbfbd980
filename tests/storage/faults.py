"""A file system in memory that fails as disks do, and repeats each failure from a seed.

See: docs/design/reliability.md, fault matrix.

What was written is kept twice: as the processes see it, and as the disk has it. `power_loss` throws the first away, but
for an arbitrary choice of the pages, sizes and names that nobody flushed.
"""

import errno
import os
import random
from collections.abc import Callable, Sequence

from babelbus.storage.errors import FolderLockedError
from babelbus.storage.files import File

PAGE_BYTES = 4096


class Inode:
    """A file's bytes as they are seen, and as the disk has them."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.durable = bytearray()
        self.dirty: set[int] = set()
        self.used = 0
        """The size without what `resize` added: a hole takes no room on the disk."""

    def write(self, data: bytes | memoryview, position: int) -> None:
        if position > len(self.content):
            self.resize(position)
        self.content[position : position + len(data)] = data
        self.used = max(self.used, position + len(data))
        self.dirty.update(range(position // PAGE_BYTES, (position + max(len(data), 1) - 1) // PAGE_BYTES + 1))

    def resize(self, size: int) -> None:
        old = len(self.content)
        self.used = min(self.used, size)
        if size < old:
            del self.content[size:]
        else:
            self.content.extend(bytes(size - old))
        self.dirty.update(range(min(size, old) // PAGE_BYTES, max(size, old) // PAGE_BYTES + 1))

    def flush(self) -> None:
        self.durable = bytearray(self.content)
        self.dirty.clear()

    def drop_unflushed(self) -> None:
        """Forget what a failed flush left: the system marks such pages clean, and may drop them."""
        self.content = bytearray(self.durable)
        self.used = min(self.used, len(self.content))
        self.dirty.clear()

    def lose_power(self, chance: random.Random) -> None:
        sizes = (len(self.durable), len(self.content))
        size = chance.choice([*sizes, chance.randint(min(sizes), max(sizes))]) if self.dirty else len(self.durable)
        after = bytearray(self.durable[:size].ljust(size, b"\0"))
        for page in sorted(self.dirty):
            if chance.random() < 0.5:
                part = self.content[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
                end = min(page * PAGE_BYTES + len(part), size)
                if end > page * PAGE_BYTES:
                    after[page * PAGE_BYTES : end] = part[: end - page * PAGE_BYTES]
        self.content, self.durable, self.dirty = after, bytearray(after), set()
        self.used = len(after)


class FaultyFile:
    """An open file of `FaultyFiles`."""

    def __init__(self, files: "FaultyFiles", path: str, inode: Inode) -> None:
        self._files, self._path, self._inode = files, path, inode

    def pwrite(self, data: bytes | bytearray | memoryview, position: int) -> None:
        view = memoryview(data)
        fault = self._files.take_fault("pwrite", self._path)
        growth = position + len(view) - self._inode.used
        if fault is None and growth > 0 and self._files.bytes_used + growth > self._files.bytes_max:
            fault = Fault("pwrite", errno.ENOSPC, written=len(view) - (growth - self._files.bytes_free))
        if fault is not None:
            if fault.written > 0:
                self._inode.write(view[: fault.written], position)
            raise OSError(fault.errno, os.strerror(fault.errno), self._path)
        self._inode.write(view, position)

    def pread(self, size: int, position: int) -> bytes:
        self._files.check("pread", self._path)
        return bytes(self._inode.content[position : position + size])

    def truncate(self, size: int) -> None:
        self._files.check("truncate", self._path)
        self._inode.resize(size)

    def flush(self) -> None:
        fault = self._files.take_fault("flush", self._path)
        if fault is not None:
            if fault.drop:
                self._inode.drop_unflushed()
            raise OSError(fault.errno, os.strerror(fault.errno), self._path)
        self._inode.flush()

    def size(self) -> int:
        return len(self._inode.content)

    def close(self) -> None:
        self._files.locked.discard(self._path)


class Fault:
    """What happens to a call: after `skip` calls that work, the next `times` fail.

    A write puts its first `written` bytes on the disk before it fails; a failed flush may `drop` what it was for.
    """

    def __init__(
        self,
        operation: str,
        number: int,
        *,
        skip: int = 0,
        times: int = 1,
        written: int = 0,
        drop: bool = False,
        suffix: str = "",
    ) -> None:
        self.operation, self.errno = operation, number
        self.skip, self.times, self.written, self.drop, self.suffix = skip, times, written, drop, suffix


class FaultyFiles:
    """A `FileSystem` whose calls fail when `faults` say so, and whose power can be cut. Paths are plain strings."""

    def __init__(self, *, bytes_max: int = 2**62) -> None:
        self.bytes_max = bytes_max
        self.faults: list[Fault] = []
        self.before_call: Callable[[str, str], None] = lambda operation, path: None
        """Called before each call with its name and path: to delay it, count it, or cut the power there."""
        self.locked: set[str] = set()
        self.calls = 0
        self._names: dict[str, Inode] = {}
        self._durable_names: dict[str, Inode] = {}
        self._pending: list[dict[str, Inode | None]] = []
        self._folders: set[str] = {""}

    # -- faults ------------------------------------------------------------------------------------------------------

    @property
    def bytes_used(self) -> int:
        return sum(inode.used for inode in self._names.values())

    @property
    def bytes_free(self) -> int:
        return max(self.bytes_max - self.bytes_used, 0)

    def fail(self, operation: str, number: int = errno.EIO, **how: int | bool | str) -> None:
        """Let a later call of `operation` fail; see `Fault`."""
        self.faults.append(Fault(operation, number, **how))  # type: ignore[arg-type]

    def take_fault(self, operation: str, path: str) -> Fault | None:
        self.calls += 1
        self.before_call(operation, path)
        for fault in self.faults:
            if fault.operation == operation and path.endswith(fault.suffix):
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                if fault.times <= 0:
                    self.faults.remove(fault)
                return fault
        return None

    def check(self, operation: str, path: str) -> None:
        fault = self.take_fault(operation, path)
        if fault is not None:
            raise OSError(fault.errno, os.strerror(fault.errno), path)

    def power_loss(self, seed: int) -> None:
        """Keep what was flushed, and of the rest what the seed says. Open files must not be used any more."""
        chance = random.Random(seed)
        names = dict(self._durable_names)
        for change in self._pending:
            if chance.random() < 0.5:
                _apply(names, change)
        for inode in {id(inode): inode for inode in names.values()}.values():
            inode.lose_power(chance)
        self._names, self._durable_names = names, dict(names)
        self._pending.clear()
        self.faults.clear()
        self.locked.clear()

    def settle(self) -> None:
        """Let the disk have everything, as it does some time after a clean stop (or after a test damaged it)."""
        self._durable_names = dict(self._names)
        self._pending.clear()
        for inode in self._names.values():
            inode.flush()

    def kill(self) -> None:
        """Let the process end: what was written stays, flushed or not."""
        self.faults.clear()
        self.locked.clear()

    def content(self, path: str) -> bytearray:
        """Give the bytes of a file, to be damaged."""
        return self._names[path].content

    def paths(self) -> list[str]:
        return sorted(self._names)

    def _change(self, change: dict[str, Inode | None]) -> None:
        _apply(self._names, change)
        self._pending.append(change)

    # -- FileSystem --------------------------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False, write: bool = True) -> File:
        self.check("open", path)
        if path not in self._names:
            if not create:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if self.bytes_free == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            self._change({path: Inode()})
        return FaultyFile(self, path, self._names[path])

    def read_file(self, path: str) -> bytes:
        file = self.open(path)
        return file.pread(file.size(), 0)

    def replace_file(self, path: str, content: bytes, *, mode: int = 0o600) -> None:
        temporary = f"{path}.new"
        file = self.open(temporary, create=True)
        try:
            file.truncate(0)
            file.pwrite(content, 0)
            file.flush()
        except OSError:
            self._change({temporary: None})
            raise
        self.rename(temporary, path)
        self.flush_folder(path.rpartition("/")[0])

    def make_folder(self, path: str) -> None:
        while path not in self._folders:
            self._folders.add(path)
            path = path.rpartition("/")[0]

    def close_to_others(self, path: str, names: Sequence[str], *, mode: int = 0o700) -> None:
        """Return: there are no modes here."""

    def list_folder(self, path: str) -> list[str]:
        start = f"{path}/"
        names = [name[len(start) :] for name in (*self._names, *self._folders) if name.startswith(start)]
        return sorted({name.partition("/")[0] for name in names})

    def exists(self, path: str) -> bool:
        return path in self._names or path in self._folders

    def rename(self, source: str, target: str) -> None:
        self.check("rename", source)
        if not self.exists(source):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        change: dict[str, Inode | None] = {}
        for path, inode in self._names.items():
            if path == source or path.startswith(f"{source}/"):
                change[path] = None
                change[target + path[len(source) :]] = inode
        moved = {path for path in self._folders if path == source or path.startswith(f"{source}/")}
        self._folders = (self._folders - moved) | {target + path[len(source) :] for path in moved}
        self._change(change)

    def unlink(self, path: str) -> None:
        self.check("unlink", path)
        if path in self._names:
            self._change({path: None})

    def remove_tree(self, path: str) -> None:
        self._change({name: None for name in self._names if name.startswith(f"{path}/")})
        self._folders = {name for name in self._folders if name != path and not name.startswith(f"{path}/")}

    def flush_folder(self, path: str) -> None:
        self.check("flush_folder", path)
        rest = []
        for change in self._pending:
            if any(name.startswith(f"{path}/") for name in change):
                _apply(self._durable_names, change)
            else:
                rest.append(change)
        self._pending = rest

    def lock(self, path: str) -> File:
        if path in self.locked:
            raise FolderLockedError(f"{path} is in use")
        file = self.open(path, create=True)
        self.locked.add(path)
        return file


def _apply(names: dict[str, Inode], change: dict[str, Inode | None]) -> None:
    for path, inode in change.items():
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode
