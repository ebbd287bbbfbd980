"""A process that owns streams: `python -m tests.storage.jetstream.writer URL PREFIX FOLDER`.

For each line `write N` it appends a record with the payload N and prints `stored N` or what was raised.
"""

import sys

from babelbus.clock import SystemClock
from babelbus.config import JetstreamSettings
from babelbus.errors import StorageError
from babelbus.records.format import encode_batch
from babelbus.records.record import Record
from babelbus.storage.contract import LogSettings
from babelbus.storage.files import LocalFiles
from babelbus.storage.jetstream import JetstreamStore


def main() -> None:
    url, prefix, folder = sys.argv[1:]
    settings = JetstreamSettings(url, prefix=prefix, replicas=1, shards=1)
    store = JetstreamStore(settings, LocalFiles(), folder, SystemClock())
    log = store.open_partition("t", 0, LogSettings())
    print("ready", flush=True)
    for line in sys.stdin:
        number = line.split()[1].encode()
        try:
            log.append(encode_batch([Record(number, timestamp=1)], log.next_offset))
            log.durable()
        except StorageError as error:
            print(type(error).__name__, error, flush=True)
        else:
            print("stored", number.decode(), flush=True)


if __name__ == "__main__":
    main()
