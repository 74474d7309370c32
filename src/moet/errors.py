"""The errors a user can meet. Each names what is wrong, where, and what to do about it."""


class MoetError(Exception):
    """Base of every error that is the user's to read.

    Args:
        message: what is wrong, naming the file, tensor, key or row.
        hint: what to do about it; one sentence, may be empty.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} {hint}".strip())
        self.message = message
        self.hint = hint


class ConfigError(MoetError):
    """A setting is unknown, malformed, or impossible on this machine."""


class CheckpointError(MoetError):
    """A checkpoint is incomplete, damaged, or of a form that is not supported."""


class CalibrationError(MoetError):
    """A calibration is incomplete, damaged, or of another model, or its text cannot be used."""


class PackError(MoetError):
    """A pack is incomplete, damaged, of another model, or of another version."""


class ResidencyError(MoetError):
    """A row could not be brought to where a kernel can read it."""


class UnsupportedError(MoetError):
    """A vLLM feature, model or format that moet does not serve (yet)."""
