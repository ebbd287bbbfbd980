"""Engine `disk`: topics as folders of segment files (docs/storage.md)."""

from babelbus.storage.disk.check import Meter, Problem, Progress, Report, check_folder
from babelbus.storage.disk.checkpoint import compaction_note
from babelbus.storage.disk.checkpoint import note as checkpoint_note
from babelbus.storage.disk.index import BLOCK_ENTRY, BLOCK_RECORDS, ENTRY_BYTES
from babelbus.storage.disk.recovery import RESCUED_SUFFIX, find_bases, parse_base
from babelbus.storage.disk.repair import repair_folder
from babelbus.storage.disk.scan import scan, written_size
from babelbus.storage.disk.segment import Segment, base_name
from babelbus.storage.disk.store import LOCK_NAME, SETTINGS_NAME, FolderStore, folder_name, parse_number, topic_of

__all__ = [
    "BLOCK_ENTRY",
    "BLOCK_RECORDS",
    "ENTRY_BYTES",
    "LOCK_NAME",
    "RESCUED_SUFFIX",
    "SETTINGS_NAME",
    "FolderStore",
    "Meter",
    "Problem",
    "Progress",
    "Report",
    "Segment",
    "base_name",
    "check_folder",
    "checkpoint_note",
    "compaction_note",
    "find_bases",
    "folder_name",
    "parse_base",
    "parse_number",
    "repair_folder",
    "scan",
    "topic_of",
    "written_size",
]
