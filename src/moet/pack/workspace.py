"""The directory of an unfinished pack: one writer, a journal of finished layers, publication.

A pack grows in `PACK.partial`. When a layer's file is on disk its entry is appended to
`journal.jsonl`, whose first line is the recipe. After a kill the next run takes the finished layers
from there. At the end `moet.json` is written, the journal removed and the directory renamed, so
that PACK either does not exist or is complete.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from pydantic import ValidationError

from moet.errors import PackError
from moet.pack.files import sync_directory, write_exact, write_file, writing
from moet.pack.manifest import (
    MANIFEST_NAME,
    LayerEntry,
    Manifest,
    Recipe,
    canonical,
    differences,
    layer_layout,
    parse_manifest,
)
from moet.pack.reader import read_tail
from moet.pack.strict import Strict

JOURNAL_NAME = "journal.jsonl"
_OWN_NAME = re.compile(r"(moet\.json|layer-\d{5}\.safetensors)(\.tmp)?")


class Workspace:
    """The unfinished pack that becomes `out`; a context manager that holds its lock.

    Attributes:
        partial: the directory that is written to.
        finished: entries of the layers that an earlier run has finished, in any order.
        complete: the manifest, when an earlier run wrote it and was killed before publishing.

    Raises PackError when `out` exists (and `overwrite` is not given, or it is not a pack), when
    another process writes to it, when the unfinished pack there was made by another recipe (and
    `overwrite` is not given), and when the directory cannot be written.
    """

    def __init__(self, out: Path, recipe: Recipe, *, overwrite: bool) -> None:
        self.out = out
        self.partial = out.with_name(out.name + ".partial")
        self.finished: list[LayerEntry] = []
        self.complete: Manifest | None = None
        self._recipe = recipe
        self._overwrite = overwrite
        self._journal = -1

    def __enter__(self) -> Workspace:
        check_replaceable(self.out, overwrite=self._overwrite)
        with writing(self.partial):
            self.partial.mkdir(parents=True, exist_ok=True)
            self._lock()
            try:
                self._resume()
            except BaseException:
                self._unlock()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._unlock()

    def add(self, entry: LayerEntry) -> None:
        """Journals a layer whose file is durable."""
        with writing(self.partial / JOURNAL_NAME):
            self._append(entry.model_dump_json())

    def publish(self, manifest: Manifest) -> None:
        """Turns the finished directory into the pack."""
        old = self.out.with_name(self.out.name + ".old")
        with writing(self.out):
            if self.complete is None:
                write_file(
                    self.partial / MANIFEST_NAME, canonical(manifest.model_dump(mode="json"))
                )
            (self.partial / JOURNAL_NAME).unlink()
            sync_directory(self.partial)
            if (self.out / MANIFEST_NAME).exists():
                _remove_pack(old)
                self.out.rename(old)
            self.partial.rename(self.out)
            sync_directory(self.out.parent)
            _remove_pack(old)

    def _lock(self) -> None:
        path = self.partial / JOURNAL_NAME
        self._journal = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The other writer may have finished and removed its journal since we opened it.
            mine, there = os.fstat(self._journal), path.stat()
            if (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            self._unlock()
            raise PackError(
                f"{self.out}: another process is writing this pack.",
                "Wait for it, or choose another directory.",
            ) from None

    def _unlock(self) -> None:
        if self._journal >= 0:
            os.close(self._journal)  # releases the lock
            self._journal = -1

    def _resume(self) -> None:
        """Finds out what an earlier run has left, and removes what cannot be used."""
        length = os.fstat(self._journal).st_size
        *lines, _torn = os.pread(self._journal, length, 0).split(b"\n")
        if not lines and (self.partial / MANIFEST_NAME).exists():
            if self._finished_before():
                return
        elif lines and self._same(_parse(Recipe, lines[0])):
            self.finished = self._journalled(lines[1:])
        self._clean()
        if self.finished:
            kept = lines[: 1 + len(self.finished)]
            os.ftruncate(self._journal, sum(len(line) + 1 for line in kept))
        else:
            os.ftruncate(self._journal, 0)
            self._append(self._recipe.model_dump_json())

    def _finished_before(self) -> bool:
        """Whether only the renaming of the directory is missing."""
        path = self.partial / MANIFEST_NAME
        try:
            manifest = parse_manifest(path.read_bytes(), path)
        except PackError:
            return self._same(None)
        if not self._same(manifest) or not all(map(self._is_whole, manifest.layers)):
            return False
        self.complete, self.finished = manifest, list(manifest.layers)
        return True

    def _same(self, found: Recipe | None) -> bool:
        """Whether `found` is our recipe; False means: start anew, which only `overwrite` allows."""
        changes = ["it was made by another version of moet"]
        if found is not None:
            fields = {name: getattr(found, name) for name in Recipe.model_fields}
            changes = differences(self._recipe, Recipe(**fields))
        if changes and not self._overwrite:
            raise PackError(
                f"{self.partial} is an unfinished pack of another kind: {'; '.join(changes)}.",
                "Delete that directory, or allow overwriting, to start anew.",
            )
        return not changes

    def _journalled(self, lines: list[bytes]) -> list[LayerEntry]:
        """The entries up to the first that is torn or whose file is not what it says."""
        entries: list[LayerEntry] = []
        missing = set(self._recipe.geometry.moe_layers)
        for line in lines:
            entry = _parse(LayerEntry, line)
            if entry is None or entry.layer not in missing or not self._is_whole(entry):
                break
            missing.remove(entry.layer)
            entries.append(entry)
        return entries

    def _is_whole(self, entry: LayerEntry) -> bool:
        """Whether all but the rows of the layer's file is right; the rows were durable before."""
        recipe = self._recipe
        layout = layer_layout(recipe.geometry, recipe.format.slices, entry.layer, entry.fp4)
        try:
            read_tail(self.partial / entry.file, layout, entry)
        except PackError:
            return False
        return True

    def _clean(self) -> None:
        keep = {entry.file for entry in self.finished}
        for path in self.partial.iterdir():
            if _OWN_NAME.fullmatch(path.name) and path.name not in keep:
                path.unlink()

    def _append(self, line: str) -> None:
        end = os.lseek(self._journal, 0, os.SEEK_END)
        write_exact(self._journal, line.encode() + b"\n", end)
        os.fsync(self._journal)


P = TypeVar("P", bound=Strict)


def _parse(kind: type[P], line: bytes) -> P | None:
    try:
        return kind.model_validate_json(line)
    except ValidationError:
        return None


def check_replaceable(out: Path, *, overwrite: bool) -> None:
    """Raises PackError unless `out` is absent, empty, or a pack that may be overwritten."""
    try:
        names = {path.name for path in out.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise PackError(
            f"{out}: cannot be a pack's directory ({error.strerror}).", "Choose another path."
        ) from None
    if not names:
        return
    if MANIFEST_NAME not in names or any(not _OWN_NAME.fullmatch(name) for name in names):
        raise PackError(
            f"{out}: exists and holds other files than a pack's.", "Choose another directory."
        )
    if not overwrite:
        raise PackError(
            f"{out}: there is a pack already.",
            "Choose another directory, or allow overwriting it.",
        )


def _remove_pack(path: Path) -> None:
    """Removes a directory that holds nothing but a pack, if it is there."""
    if path.exists():
        check_replaceable(path, overwrite=True)
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
