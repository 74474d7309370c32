"""Where `moet pack` gets a model from: a directory, the Hugging Face cache, or the hub itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moet.checkpoints import Checkpoint
from moet.checkpoints.hub import SCHEME, HubShards, open_hub
from moet.checkpoints.local import local_checkpoint
from moet.errors import ConfigError
from moet.settings import default_pack_path


@contextmanager
def open_source(
    model: str, output: Path | None, *, keep: bool
) -> Iterator[tuple[Checkpoint, Path]]:
    """The checkpoint MODEL, and the path of its pack: `output`, or the model's default place.

    What `hf://OWNER/NAME` needs of the hub is downloaded beside the pack, in PACK.shards; it is
    removed when the block ends well, and a later run finds it when it does not. keep: the
    checkpoint goes into the Hugging Face cache, whole, and stays there.
    """
    if not model.startswith(SCHEME):
        if keep:
            raise ConfigError(
                f"--keep-checkpoint is about {SCHEME}OWNER/NAME; {model} is here and stays here.",
                "Leave it out.",
            )
        with Checkpoint.open(local_checkpoint(model)) as checkpoint:
            yield checkpoint, output or default_pack_path(checkpoint.name, checkpoint.identity)
        return
    place = output or default_pack_path(model.removeprefix(SCHEME), "hub")
    directory = Path(f"{place.absolute()}.shards")
    with open_hub(model, directory, keep=keep) as checkpoint:
        yield checkpoint, output or default_pack_path(checkpoint.name, checkpoint.identity)
        shards = checkpoint.shards
        assert isinstance(shards, HubShards)
        for file in shards.files if keep else ():
            shards.fetch(file)
        shards.delete()
