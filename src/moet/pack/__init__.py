"""The pack on disk: layout, writer, reader, verification; rows as a source for residency."""

from moet.pack.inspect import PackSummary, inspect_pack
from moet.pack.progress import Work
from moet.pack.reader import Pack
from moet.pack.rows import PackRowSource
from moet.pack.source import RowKey, RowSource
from moet.pack.verify import verify_pack
from moet.pack.writer import PackReport, write_pack

__all__ = [
    "Pack",
    "PackReport",
    "PackRowSource",
    "PackSummary",
    "RowKey",
    "RowSource",
    "Work",
    "inspect_pack",
    "verify_pack",
    "write_pack",
]
