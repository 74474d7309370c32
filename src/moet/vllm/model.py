"""From vLLM's configuration to the checkpoint and pack that it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from moet.checkpoints import Checkpoint
from moet.errors import CheckpointError, PackError
from moet.pack import Pack
from moet.settings import Settings, default_pack_path


def checkpoint_path(vllm_config: Any) -> Path:
    """The directory of the target model's files.

    Raises CheckpointError for a hub name whose files are not on this machine.
    """
    config = vllm_config.model_config
    path = Path(config.model)
    if path.is_dir():
        return path
    try:
        return Path(
            snapshot_download(
                config.model,
                revision=config.revision,
                cache_dir=vllm_config.load_config.download_dir,
                local_files_only=True,
            )
        )
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"{config.model} is not on this machine; a pack is made from, and served beside, the "
            "checkpoint's own files.",
            f"Run `hf download {config.model}` and `moet pack {config.model}`.",
        ) from None


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
