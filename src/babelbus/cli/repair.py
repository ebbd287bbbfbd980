"""`babelbus check` and `babelbus repair`: find and repair damage in a data folder."""

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from babelbus.cli.command import BusCommand, CommandError, examples
from babelbus.cli.output import human_bytes, note, plural, print_json, print_line, progress
from babelbus.cli.target import Target, lock_owner
from babelbus.cli.target_options import folder_options
from babelbus.errors import ConfigError, StorageError
from babelbus.storage import notes

if TYPE_CHECKING:
    from babelbus.storage.disk import Problem, Report

DATABASE_NAME = "db.sqlite"
GROUP_NOTES = ("groups.0", "groups.1")
ACCESS_NOTE = "access.json"
NOTES = ("zbus.json", ACCESS_NOTE, *GROUP_NOTES)
DATABASE_ADVICE = "a database is never changed by repair: restore its rows from a backup"

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON: a problem a line, then the summary.")


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus check                              the data folder of the configuration",
        "babelbus check /var/lib/babelbus --json",
    ),
)
@click.argument("folder", required=False)
@json_option
@folder_options
def check(target: Target, folder: str | None, as_json: bool) -> None:
    """Read every record and every index of a data folder, and list the problems. Nothing is changed.

    The database of topics with engine db is read too: db.url of the configuration (--config, BABELBUS_DB_URL), else
    db.sqlite in the folder. The server may run meanwhile. Exit code 0: all is well; 1: there are problems.
    """
    from babelbus.storage.disk import check_folder
    from babelbus.storage.files import LocalFiles

    path = _folder(target, folder, "babelbus check")
    # Files like leftovers of a crash may belong to a running server.
    live = lock_owner(path) is not None
    topics, amiss = _find_topics(path)
    database = _check_database(target, path, topics, live=live)
    with _bytes_read(f"check {path}") as advance:
        report = check_folder(LocalFiles(), path, _partitions(topics, "disk"), progress=advance, live=live)
    advice = f"stop the server and run 'babelbus repair {path}'" if report.problems else ""
    if live:  # what was made or removed meanwhile looked wrong once
        again = _find_topics(path)[1]
        amiss = [problem for problem in amiss if problem in again]
    report.problems += amiss
    _add_notes(report, path)
    _add_database(report, database)
    if database.problems:
        advice = "; ".join(filter(None, (advice, DATABASE_ADVICE)))
    _tell(report, "repair would", as_json, advice, {})
    if report.problems:
        click.get_current_context().exit(1)


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus repair --dry-run                   what it would do",
        "babelbus repair /var/lib/babelbus",
    ),
)
@click.argument("folder", required=False)
@click.option("--dry-run", is_flag=True, help="Show the repairs without making them.")
@json_option
@folder_options
def repair(target: Target, folder: str | None, dry_run: bool, as_json: bool) -> None:
    """Repair the problems that 'babelbus check' finds. The server must be stopped.

    Indexes are built again; damaged bytes are moved to a file beside the log and never deleted, and readers continue
    behind them. A database (engine db) is read and not changed: its problems are left.

    Exit code 0: no problem is left; 1: problems are left, or (--dry-run) were found.
    """
    from babelbus.storage.disk import repair_folder
    from babelbus.storage.files import LocalFiles

    path = _folder(target, folder, "babelbus repair")
    topics, amiss = _find_topics(path)
    database = _check_database(target, path, topics, live=False)
    expected = _partitions(topics, "disk")
    with _bytes_read(f"repair {path}") as advance:
        report = repair_folder(LocalFiles(), path, expected, dry_run=dry_run, progress=advance)
    mendable = bool(report.problems)
    report.problems += amiss
    report.left += amiss
    _add_notes(report, path)
    _add_database(report, database)
    left = report.problems if dry_run else report.left
    advice = ""
    if left:
        advice = "1 problem is left" if len(left) == 1 else f"{len(left):,} problems are left"
        if dry_run:
            advice = f"nothing was changed; 'babelbus repair {path}' does it" if mendable else "nothing was changed"
        if database.problems:
            advice += f"; {DATABASE_ADVICE}"
    more = {"dry_run": dry_run, "kept": report.kept, "left": len(left)}
    _tell(report, "repair would" if dry_run else "done", as_json, advice, more)
    if not as_json and not dry_run:
        for file in report.kept:
            print_line(f"damaged bytes are kept in {file}")
        for problem in left:
            print_line(f"still wrong: {show_problem(problem, 'to do')}")
    if left:
        click.get_current_context().exit(1)


def _folder(target: Target, folder: str | None, command: str) -> str:
    if folder is None:
        target.check_local(command)
    path = os.path.abspath(folder) if folder is not None else target.existing_folder()
    # A folder of something else would be "clean", which is worse than an error.
    try:
        is_data_folder = stat.S_ISDIR(os.stat(os.path.join(path, "topics")).st_mode)
    except PermissionError as error:
        raise CommandError(f"{path}: {error.strerror}; run this as the user of the server") from error
    except OSError:
        is_data_folder = False
    if not is_data_folder:
        raise CommandError(f"{path} is no data folder: it has no folder 'topics'; name the right one")
    return path


class _Settings(msgspec.Struct):
    engine: str = "disk"


class _Catalogued(msgspec.Struct):
    """The fields of a topic's settings file that a check needs."""

    partitions: int
    settings: _Settings
    on_disk: bool = False
    """Whether the topic's folder has partitions: no field of the file."""


def _add_notes(report: "Report", path: str) -> None:
    """Add the damaged notes of a data folder to a report: settings of topics, cursors of groups, queues of zbus, the
    version of the table of access, parts and notes of transactions.
    """
    from babelbus.core.transactions import find_damage
    from babelbus.storage.disk import Problem
    from babelbus.storage.files import LocalFiles

    faults: dict[Path, str] = {}
    versions: dict[str, int] = {}
    for file in sorted(Path(path).glob("staging/*")):
        try:
            damage = find_damage(LocalFiles(), str(file))
        except StorageError as error:
            damage = str(error) if file.exists() else ""  # a running server removes what was committed
        if damage:
            faults[file] = damage
    for file in sorted([*Path(path).glob("topics/*/settings.json"), *map(Path(path).joinpath, NOTES)]):
        if not file.exists():
            continue
        try:
            bare = file.name not in (ACCESS_NOTE, *GROUP_NOTES)
            note = notes.decode(file.read_bytes(), dict[str, Any], path=str(file), bare=bare)
        except OSError as error:
            faults[file] = f"the disk refuses it: {error.strerror}"
        except notes.DamagedNoteError as error:
            faults[file] = str(error)
        else:
            versions[file.name] = note.get("sequence", 0)
    for name, other in (GROUP_NOTES, GROUP_NOTES[::-1]):
        file = Path(path, name)
        if versions.get(other, 0) > 1 and not file.exists():
            faults[file] = f"missing: version {versions[other]} is in {other}, the version before or after it was here"
    for file, fault in faults.items():
        problem = Problem("note", str(file), fault, f"nothing: {notes.COPY_BACK}")
        report.problems.append(problem)
        report.left.append(problem)


def _find_topics(path: str) -> tuple[dict[str, _Catalogued], list["Problem"]]:
    """Return the topics of a data folder with what their settings say, and what the folder lacks of those it had.

    Settings that cannot be read are not among either: `_add_notes` names them.
    """
    from babelbus.server.access import TOPICS_NAME, AccessLists
    from babelbus.storage.disk import Problem, parse_number, topic_of
    from babelbus.storage.files import LocalFiles

    root, conf = os.path.join(path, "topics"), os.path.join(path, "conf")
    topics: dict[str, _Catalogued] = {}
    problems: list[Problem] = []
    try:
        listed = AccessLists(LocalFiles(), conf).read_topics()
    except (ConfigError, OSError) as error:
        listed = {}
        problems.append(Problem("note", os.path.join(conf, TOPICS_NAME), str(error), "nothing: correct the line"))
    for folder in sorted(os.listdir(root)):
        topic = topic_of(folder)
        if topic is None:
            continue
        count, settings = listed.pop(topic, 0), os.path.join(root, folder, "settings.json")
        numbered = False
        try:
            numbered = any(parse_number(name) is not None for name in os.listdir(os.path.join(root, folder)))
            with open(settings, "rb") as file:
                note = notes.decode(file.read(), _Catalogued, path=settings, bare=True)
        except FileNotFoundError:
            if numbered:  # a start gives it the default settings
                topics[topic] = _Catalogued(count, _Settings(), on_disk=True)
            elif count:
                reason = "it is missing, and nothing else says which engine has the records of the topic"
                problems.append(Problem("missing", settings, reason, f"nothing: {notes.COPY_BACK}"))
        except (OSError, notes.DamagedNoteError):
            continue
        else:
            topics[topic] = note
            note.on_disk = numbered
            if numbered and note.settings.engine == "memory":
                reason = "it names engine memory, and the folder has partitions of engine disk"
                problems.append(Problem("note", settings, reason, "nothing: put the right copy of the file back"))
    for topic in listed:
        reason = f"it is in conf/{TOPICS_NAME} and has no folder: the next start makes it, empty"
        problems.append(Problem("missing", f"topic {topic!r}", reason, "nothing: put its folder back, if it had one"))
    return topics, problems


def _partitions(topics: dict[str, _Catalogued], engine: str) -> dict[str, int]:
    """Return the topics of an engine with their numbers of partitions."""
    return {topic: each.partitions for topic, each in topics.items() if each.settings.engine == engine}


def _check_database(target: Target, path: str, topics: dict[str, _Catalogued], *, live: bool) -> "Report":
    """Return what the database of topics with engine db has, and what is wrong with it.

    Topics of it whose settings name another engine are taken out of `topics`: a repair must not begin them anew.
    """
    from babelbus.storage.disk import Problem, Report, folder_name
    from babelbus.storage.files import LocalFiles

    url, default = None, os.path.join(path, DATABASE_NAME)
    if path == target.folder:  # else the configuration is another server's
        url = target.config.db.url
    if not _partitions(topics, "db") and url is None and not os.path.exists(default):
        return Report()  # do not import SQLAlchemy, which is slow
    from babelbus.storage.sql import check_database

    try:
        with _bytes_read("check the database") as advance:
            result = check_database(url or f"sqlite:///{default}", LocalFiles(), progress=advance, live=live)
    except StorageError as error:
        fix = "nothing: make sure that the database can be reached"
        return Report([Problem("unreadable", "the database", str(error), fix)])
    counts = Counter(topic for topic, _ in result.partitions)
    for topic in sorted(counts.keys() & topics.keys()):
        engine = topics[topic].settings.engine
        if engine != "db" and not topics[topic].on_disk:
            settings = os.path.join(path, "topics", folder_name(topic), "settings.json")
            reason = f"it names engine {engine}, and the database has partitions of the topic"
            fix = "nothing: put the right copy of the file back"
            result.problems.append(Problem("note", settings, reason, fix))
            del topics[topic]
    fix = "nothing: name its database with --config or BABELBUS_DB_URL, if it is another one"
    result.problems += [
        Problem("missing", f"topic {topic!r}", f"{count - counts[topic]} partitions are not in the database", fix)
        for topic, count in sorted(_partitions(topics, "db").items())
        if counts[topic] < count
    ]
    return result


def _add_database(report: "Report", result: "Report") -> None:
    """Add what was found in the database to a report."""
    report.partitions += result.partitions
    report.problems += result.problems
    report.segments += result.segments
    report.records += result.records
    report.size_bytes += result.size_bytes
    report.left += result.problems


@contextmanager
def _bytes_read(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show the bytes read; yield the function that takes the bytes read so far and the total."""
    with progress(what, None, "bytes") as advance:
        last = 0

        def seen(done: int, total: int) -> None:
            nonlocal last
            advance(done - last, total)
            last = done

        yield seen


def _tell(report: "Report", label: str, as_json: bool, advice: str, more: dict[str, Any]) -> None:
    problems = report.problems
    summary = {
        "problems": len(problems),
        "partitions": len(report.partitions),
        "segments": report.segments,
        "records": report.records,
        "bytes": report.size_bytes,
    }
    if as_json:
        for problem in problems:
            print_json(msgspec.to_builtins(problem))
        print_json(summary | more)
        return
    for problem in problems:
        print_line(show_problem(problem, label))
    print_line(
        f"{plural(summary['records'], 'record')} in {plural(summary['segments'], 'segment')} "
        f"of {plural(summary['partitions'], 'partition')}, "
        f"{human_bytes(report.size_bytes)}: {plural(len(problems), 'problem') if problems else 'all is well'}"
    )
    if advice:
        note(f"babelbus: {advice}")


def show_problem(problem: "Problem", label: str) -> str:
    """Return a problem as one line: file, position in it, offsets, reason, and what repair does."""
    where = "" if problem.position is None else f", byte {problem.position}"
    if problem.offset is not None:
        last = "" if problem.next_offset is None else f" to {problem.next_offset - 1}"
        where += f", offset {problem.offset}{last}"
    advice = problem.repair.removeprefix("nothing: ")
    outcome = f"{label}: {advice}" if advice == problem.repair else f"repair leaves it: {advice}"
    return f"{problem.file}{where}: {problem.kind}: {problem.reason} ({outcome})"
