"""The import table of the house (docs/design/style.md, "Layers"), read from the sources: who may know what."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = SOURCE / "babelbus"

LEAVES = {"allocator", "errors", "clock", "config", "metrics", "units", "settings"}
RECORDS = LEAVES | {"records"}
STORAGE = RECORDS | {"storage"}
CORE = STORAGE | {"core"}

# The first part of a module's name below `babelbus` -> what it may import, by first part, besides itself.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "allocator": set(),
    "clock": set(),
    "metrics": set(),
    "units": {"errors"},
    "settings": {"errors", "units"},
    "config": {"errors", "units", "settings"},
    "records": {"errors"},
    "storage": RECORDS,
    "core": STORAGE,
    "wire": {"errors"},
    "protocols": CORE | {"wire"},
    "clients": RECORDS | {"wire", "storage", "protocols"},
    "client": {"errors", "clock", "records", "storage", "protocols", "clients"},
    "web": CORE | {"wire"},
    "server": CORE | {"wire", "protocols", "web"},
    "spark": STORAGE | {"wire", "protocols", "client", "clients"},
    "cli": CORE | {"wire", "protocols", "client", "clients", "web", "server", "spark"},
    "__main__": {"cli"},
}

# Modules of a protocol that turn bytes into messages and back: no I/O, no clock, no log, no broker.
PURE_NAMES = {"codec", "decoder", "messages", "box", "handshake", "status", "frames", "names", "readers", "values"} | {
    *("content", "records", "http_mapping", "signature", "routing", "filters", "errors", "multipart"),
}
IMPURE_LIBRARIES = {"asyncio", "socket", "logging", "time", "datetime", "select", "selectors", "ssl", "subprocess"}

# Cycles that stand until the rooms that they are in are rewritten; never add one.
CYCLES = {
    ("babelbus.server.administration", "babelbus.server.app"),
    ("babelbus.storage.sql.cleaner", "babelbus.storage.sql.log"),
}

TIME_CALLS = {
    "time": {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "localtime", "gmtime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
FILE_CALLS = {"open", "read", "pread", "preadv", "write", "writev", "pwrite", "pwritev", "fsync", "fdatasync"} | {
    *("rename", "replace", "truncate", "ftruncate", "unlink", "remove", "mkdir", "makedirs", "rmdir", "link", "symlink")
}


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports(module: str) -> Iterator[str]:
    """Yield every module that `module` names in an import: lazy imports and those below `if TYPE_CHECKING:` too."""
    is_package = MODULES[module].name == "__init__.py"
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:  # `from babelbus.storage import log` is an import of babelbus.storage.disk.log
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


def ours(module: str) -> list[str]:
    return sorted({name for name in imports(module) if name.split(".")[0] == "babelbus"} - {module})


def first(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def is_pure(module: str) -> bool:
    parts = module.split(".")
    return first(module) == "wire" or (first(module) == "protocols" and parts[-1] in PURE_NAMES)


def calls(module: str) -> Iterator[tuple[str, str, int]]:
    """(what, name, line) of calls `what.name(...)`, and ("", name, line) of plain calls."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            value = node.func.value
            what = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else "?"
            yield what, node.func.attr, node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield "", node.func.id, node.lineno


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_the_table_allows(module: str) -> None:
    if module == "babelbus":
        assert ours(module) == []
        return
    allowed = ALLOWED[first(module)] | {first(module), ""}  # "" is babelbus itself: the version
    assert [name for name in ours(module) if first(name) not in allowed] == []


@pytest.mark.parametrize("module", [name for name in MODULES if first(name) == "protocols"])
def test_a_protocol_imports_no_other_protocol(module: str) -> None:
    own = module.split(".")[2:3]
    others = [
        name for name in ours(module) if first(name) == "protocols" and name.split(".")[2:3] not in (own, ["contract"])
    ]
    assert own == [] or others == []


@pytest.mark.parametrize("module", [name for name in MODULES if is_pure(name)])
def test_a_codec_does_no_io_and_knows_neither_clock_nor_log_nor_broker(module: str) -> None:
    package = module.rpartition(".")[0]
    seen, waiting = {module}, [module]
    while waiting:  # what it takes from its own package must be as innocent as itself
        current = waiting.pop()
        assert {name.split(".")[0] for name in imports(current)} & IMPURE_LIBRARIES == set(), current
        for name in ours(current):
            assert first(name) in ("errors", "wire") or name.startswith(f"{package}."), f"{current} imports {name}"
            if first(name) != "errors" and name not in seen:
                seen.add(name)
                waiting.append(name)


@pytest.mark.parametrize("module", MODULES)
def test_only_spark_imports_pyspark(module: str) -> None:
    assert first(module) == "spark" or "pyspark" not in {name.split(".")[0] for name in imports(module)}


@pytest.mark.parametrize("module", [name for name in MODULES if first(name) != "clock"])
def test_only_the_clock_asks_for_the_time(module: str) -> None:
    if "bench" in module.split(".")[-1]:  # a stopwatch is what a benchmark is
        return
    nodes = [node for node in ast.walk(tree(module)) if isinstance(node, ast.ImportFrom) and node.module == "time"]
    from_time = {alias.name for node in nodes for alias in node.names}
    assert from_time & TIME_CALLS["time"] == set()
    assert [(what, name, line) for what, name, line in calls(module) if name in TIME_CALLS.get(what, set())] == []


@pytest.mark.parametrize("module", [name for name in MODULES if first(name) == "storage"])
def test_only_the_file_layer_of_storage_calls_the_operating_systems_files(module: str) -> None:
    if module == "babelbus.storage.files":
        return
    found = [
        (what, name, line)
        for what, name, line in calls(module)
        if (what == "os" and name in FILE_CALLS) or (what, name) == ("", "open") or what in ("shutil", "Path")
    ]
    assert found == []


def test_there_is_no_cycle_of_imports() -> None:
    done: set[str] = set()
    cycles: set[tuple[str, ...]] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            cycles.add(tuple(sorted(path[path.index(module) :])))
        elif module not in done and module in MODULES:
            for name in ours(module):
                visit(name, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())
    assert cycles == CYCLES
