"""The hub's errors, in words that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from moet.errors import CheckpointError

_AGAIN = "Check the connection and run the same command again; `moet pack` resumes."
# The base of every HTTP error, transport included: httpx's or httpx2's, by huggingface_hub's age;
# the disk's errors; and those of answers that are not what they should be.
_FAILURES: tuple[type[BaseException], ...] = (HfHubHTTPError.__bases__[0], OSError, ValueError)


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turns huggingface_hub's errors into CheckpointErrors.

    A file that the repository does not have is such an error too; who can do without one catches
    EntryNotFoundError inside.

    Args:
        name: of the repository, as the user gave it.
    """
    try:
        yield
    except HFValidationError:
        raise CheckpointError(
            f"{name!r} is no name of a model on the hub.",
            "Give OWNER/NAME, or the directory of a checkpoint on this machine.",
        ) from None
    except GatedRepoError:
        raise CheckpointError(
            f"{name} is gated on the hub.", "Accept its terms there and run `hf auth login`."
        ) from None
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise CheckpointError(
            f"the hub has no model {name}, or not that revision of it.",
            "Check the spelling; a private model needs `hf auth login`, a checkpoint on this "
            "machine is given by its directory.",
        ) from None
    except LocalEntryNotFoundError:
        raise CheckpointError(f"{name}: the hub cannot be reached.", _AGAIN) from None
    except _FAILURES as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{name}: the download failed ({reason}).", _AGAIN) from None
