"""From vLLM's configuration to the checkpoint and pack that it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moet.checkpoints import Checkpoint
from moet.checkpoints.local import local_checkpoint
from moet.errors import PackError
from moet.pack import Pack
from moet.settings import Settings, default_pack_path


def checkpoint_path(vllm_config: Any) -> Path:
    """The directory of the target model's files.

    Raises CheckpointError for a hub name whose files are not on this machine.
    """
    config = vllm_config.model_config
    return local_checkpoint(config.model, config.revision, vllm_config.load_config.download_dir)


def open_pack(settings: Settings, checkpoint: Checkpoint) -> Pack:
    """The pack of the settings, or of the default place; it is the model's, or PackError."""
    path = settings.pack or default_pack_path(checkpoint.name, checkpoint.identity)
    if settings.pack is None and not path.exists():
        raise PackError(
            f"there is no pack of {checkpoint.name} at {path}.",
            f"Make it with `moet pack {checkpoint.path}`, or name one that exists with "
            '--additional-config \'{"moet": {"pack": "DIRECTORY"}}\'.',
        )
    pack = Pack.open(path)
    pack.check_model(checkpoint)
    return pack
