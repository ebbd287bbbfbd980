"""The import table of the house (docs/design/style.md, "Layers"), read from the sources: who may know what."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = SOURCE / "babelbus"

LEAVES = {"allocator", "errors", "clock", "config", "descriptors", "limited_log", "metrics", "units"}
RECORDS = LEAVES | {"arrays", "records"}
STORAGE = RECORDS | {"storage"}
CORE = STORAGE | {"core", "identities"}

# The first part of a module's name below `babelbus` -> what it may import, by first part, besides itself.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "allocator": set(),
    "arrays": set(),
    "clock": set(),
    "descriptors": set(),
    "limited_log": {"clock"},
    "metrics": set(),
    "units": {"errors"},
    "config": {"errors", "units"},
    "listening": LEAVES | {"identities"},
    "link": LEAVES | {"identities", "listening"},
    "records": {"arrays", "errors"},
    "storage": RECORDS,
    "identities": LEAVES,
    "core": STORAGE | {"identities"},
    "wire": {"arrays", "errors"},
    "protocols": CORE | {"wire", "listening"},
    "clients": RECORDS | {"wire", "storage", "protocols"},
    "client": {"errors", "clock", "records", "storage", "protocols", "clients"},
    "testing": {"errors", "client"},
    "web": CORE | {"wire", "listening"},
    "server": CORE | {"wire", "listening", "link", "protocols", "web"},
    "spark": STORAGE | {"wire", "protocols", "client", "clients"},
    "cli": CORE | {"wire", "protocols", "client", "clients", "web", "server", "spark"},
    "__main__": {"cli"},
}

SOCKETS = "protocols.sbus.packets"
SHARED_BY_PROTOCOLS = {"browsers", "budget", "busy_poll", "contract", "connection", "listeners", "service"}
IMPURE_LIBRARIES = {"asyncio", "socket", "logging", "time", "datetime", "select", "selectors", "ssl", "subprocess"}

# Packages that others enter only by their face, `__init__`.
FACES = {
    "config",
    "storage.disk",
    "storage.sql",
    "storage.jetstream",
    "core.groups",
    "core.state",
    "core.transactions",
    "wire.http",
    "wire.http2",
    "wire.websocket",
} | {
    *("clients.jebp", "clients.worterbuch", "protocols.sbus.packets"),
}

# What knows files and databases, and who may import it: the server, the commands that work on a data folder, Spark,
# which reads data folders, and the modules of the core that open stores.
ENGINES = ("storage.disk", "storage.sql", "storage.jetstream", "storage.files")
OPENERS = ("server", "spark", "cli.repair", "core.broker", "core.catalog", "core.stored_topics")
# Others that import an engine today. The list may only become shorter: remove what is no longer true.
ENGINE_DEBTS = {
    ("cli.clients", "storage.files"),
    ("core.groups.cursor_files", "storage.files"),
    ("core.groups.registry", "storage.files"),
    ("core.state.log", "storage.files"),
    ("core.transactions.commit", "storage.files"),
    ("core.transactions.part_file", "storage.files"),
    ("core.transactions.parts", "storage.files"),
    ("core.transactions.staging", "storage.files"),
    ("core.transactions.model", "storage.files"),
    ("protocols.service", "storage.files"),
    ("protocols.zbus.book", "storage.files"),
    ("protocols.zbus.hub", "storage.files"),
}

# Names of `records` that say where the bytes of a stored record lie; only `records` uses them.
BYTE_NAMES = {"HEAD", "HEAD_BYTES", "BODY", "PLAIN_BODY", "plain_fields", "PLAIN_DTYPE", "PLAIN_BODY_BYTES"} | {
    *("LENGTH_FROM", "LENGTH_MIN", "LENGTHS", "INT32", "INT64", "CRC_AT", "TIMESTAMP_AT", "END_TABLE"),
}
# Modules that use them, or lay an array over bytes. The list may only become shorter, as above.
BYTE_DEBTS = {"protocols.zbus.stored"}

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


@cache
def ours(module: str) -> list[str]:
    return sorted({name for name in imports(module) if name.split(".")[0] == "babelbus"} - {module})


def first(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def short(module: str) -> str:
    return module.removeprefix("babelbus.")


def below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def reached(module: str) -> set[str]:
    """The module and what it takes from its own package, directly or not."""
    package = module.rpartition(".")[0]
    seen, waiting = {module}, [module]
    while waiting:
        new = {name for name in ours(waiting.pop()) if below(name, package) or first(name) == "wire"} - seen
        seen |= new
        waiting += new
    return seen


@cache
def knows_the_core(module: str) -> bool:
    """Whether a module of a protocol is about more than bytes: it imports more than codecs, arrays and errors."""
    package = module.rpartition(".")[0]
    return any(
        first(name) not in ("arrays", "errors", "wire") and not below(name, package)
        for current in reached(module)
        for name in ours(current)
    )


def codecs() -> list[str]:
    """All of `wire`, each protocol's codec and messages, and what programs take of a protocol that are no server."""
    outside = {name for module in MODULES if first(module) in ("clients", "client", "spark") for name in ours(module)}
    return [
        module
        for module in MODULES
        if first(module) == "wire"
        or (first(module) == "protocols" and (module in outside or module.split(".")[-1] in ("codec", "messages")))
    ]


def assigned(module: str, variable: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the strings in the list that a module assigns to a variable."""
    for node in tree(module).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == variable:
            assert isinstance(node.value, ast.List)
            for element in node.value.elts:
                assert isinstance(element, ast.Constant)
                yield element.lineno, str(element.value)


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
        assert ours(module) == ["babelbus.client"], "for type checkers: it is imported when its names are asked for"
        return
    allowed = ALLOWED[first(module)] | {first(module), ""}  # "" is babelbus itself: the version
    assert [name for name in ours(module) if first(name) not in allowed] == []


@pytest.mark.parametrize("module", [name for name in MODULES if first(name) == "protocols"])
def test_a_protocol_imports_no_other_protocol(module: str) -> None:
    own = module.split(".")[2:3]
    others = [
        name
        for name in ours(module)
        if first(name) == "protocols" and name.split(".")[2:3] != own and name.split(".")[2] not in SHARED_BY_PROTOCOLS
    ]
    assert own in ([], ["registry"]) or others == []


@pytest.mark.parametrize("module", codecs())
def test_a_codec_knows_nothing_of_the_core(module: str) -> None:
    assert not knows_the_core(module)


@pytest.mark.parametrize("module", [name for name in MODULES if first(name) in ("wire", "protocols")])
def test_what_knows_nothing_of_the_core_does_no_io_and_knows_neither_clock_nor_log(module: str) -> None:
    if not knows_the_core(module) and not below(short(module), SOCKETS):
        assert {name.split(".")[0] for name in imports(module)} & IMPURE_LIBRARIES == set()


@pytest.mark.parametrize("face", sorted(FACES))
def test_a_package_with_a_face_is_entered_by_it(face: str) -> None:
    package = f"babelbus.{face}"
    exported = {name for _, name in assigned(package, "__all__")}
    inside = {
        (short(module), name)
        for module in MODULES
        if not below(module, package)
        for name in ours(module)
        if name.startswith(f"{package}.") and name.removeprefix(f"{package}.") not in exported
    }
    assert inside == set()


def test_engines_of_the_storage_are_known_to_who_opens_them_alone() -> None:
    users = {
        (short(module), engine)
        for module in MODULES
        if first(module) != "storage" and not any(below(short(module), opener) for opener in OPENERS)
        for name in ours(module)
        for engine in ENGINES
        if below(short(name), engine)
    }
    assert users == ENGINE_DEBTS


def test_only_records_knows_the_bytes_of_a_stored_record() -> None:
    def knows(module: str) -> bool:
        return any(
            (
                isinstance(node, ast.ImportFrom)
                and below(node.module or "", "babelbus.records")
                and BYTE_NAMES & {alias.name for alias in node.names}
            )
            or (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "ndarray"
                and len(node.args) > 2
            )
            for node in ast.walk(tree(module))
        )

    assert {short(module) for module in MODULES if first(module) != "records" and knows(module)} == BYTE_DEBTS


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
    assert cycles == set()
