"""What ties a pack to a checkpoint, in the manifest's terms."""

from __future__ import annotations

from moet.checkpoints.reader import Checkpoint
from moet.pack.manifest import CheckpointFile, Model, PackGeometry


def geometry_of(checkpoint: Checkpoint) -> PackGeometry:
    """The geometry of a checkpoint's rows; how to compute with them only the checkpoint says."""
    geometry = checkpoint.geometry
    return PackGeometry(**{name: getattr(geometry, name) for name in PackGeometry.model_fields})


def model_of(checkpoint: Checkpoint) -> Model:
    """Name, revision, source hash and files of a checkpoint."""
    files = [
        CheckpointFile(name=name, bytes=checkpoint.shards.size(name))
        for name in sorted({ref.file for ref in checkpoint.tensors.values()})
    ]
    return Model(
        # A directory's name need not be UTF-8, JSON must be.
        name=checkpoint.name.encode(errors="replace").decode(),
        revision=checkpoint.revision,
        source=checkpoint.identity,
        files=tuple(files),
    )
