"""Files from the Hugging Face hub: the one place that talks to it. Does not know what the files hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["hub_folder"]


def hub_folder(repo: str, patterns: Sequence[str]) -> Path:
    """Download (or find in the hub's cache) the files of `org/name` that match; returns their folder.

    Raises OSError in one line when the hub cannot be reached, or does not have the repository.
    """
    # Here, because it is slow to import and rarely needed.
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import logging

    # It retries for some 20 s, and would print a line for each attempt.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        return Path(snapshot_download(repo, allow_patterns=list(patterns)))
    except Exception as error:  # the client raises HTTP, URL, validation and its own errors
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise OSError(
            f"cannot get {repo!r} from the Hugging Face hub, and it is not a local file or folder: {first}"
        ) from error
