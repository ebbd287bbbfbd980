"""`babelbus migrate`: move topics of a data folder into a cluster of NATS."""

import click
import msgspec

from babelbus.cli.command import BusCommand, CommandError, examples
from babelbus.cli.output import human_bytes, plural, print_json, print_line, progress
from babelbus.cli.target import Target
from babelbus.cli.target_options import folder_options


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus migrate --config bus.toml           all topics with engine disk",
        "babelbus migrate orders --remove             one topic; its files are deleted afterwards",
    ),
)
@click.argument("topics", nargs=-1)
@click.option("--remove", is_flag=True, help="Delete the files of each topic when it is moved.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a topic a line.")
@folder_options
def migrate(target: Target, topics: tuple[str, ...], remove: bool, as_json: bool) -> None:
    """Move topics of a data folder into a cluster of NATS, with their offsets.

    The configuration names the cluster (jetstream.servers). The server must be stopped. Offsets stay, so consumer
    groups and the state go on where they were. Every record is compared before a topic changes over. A run that was
    stopped goes on where it was when the command is called again.

    With cluster.enabled, the whole folder moves: topics, consumer groups, the state, access, keys and settings. Members
    serve it when all of it was moved.
    """
    from babelbus.clock import SystemClock

    target.check_local("babelbus migrate")
    target.existing_folder()
    try:
        from babelbus.server import migrate as moving
        from babelbus.server.move_in import move_in
    except ModuleNotFoundError as error:
        raise CommandError(f"{error.name} is not installed: pip install 'babelbus[jetstream]'") from error
    if target.config.cluster.enabled and topics:
        raise CommandError("the whole data folder moves into a cluster (cluster.enabled): name no topics")
    with progress("migrate", None, "bytes", quiet=as_json) as advance:

        def seen(size: int) -> None:
            advance(size, None)

        if target.config.cluster.enabled:
            run = move_in(target.config, SystemClock(), remove=remove, seen=seen)
        else:
            run = moving.migrate(target.config, SystemClock(), topics, remove=remove, seen=seen)
        for moved in run:
            if as_json:
                print_json(msgspec.to_builtins(moved))
            elif moved.reason:
                print_line(f"{moved.topic or target.folder}: left where it is: {moved.reason}")
            elif moved.files:
                print_line(f"{plural(moved.files, 'file')} of groups, access, keys and the like moved")
            else:
                print_line(
                    f"{moved.topic}: {plural(moved.partitions, 'partition')} moved,"
                    f" {human_bytes(moved.copied_bytes)} copied, {human_bytes(moved.compared_bytes)} compared"
                )
