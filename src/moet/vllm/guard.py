"""Who may change a running server over HTTP."""

from __future__ import annotations

import ipaddress
from argparse import Namespace

from fastapi import HTTPException
from starlette.datastructures import State
from vllm import envs


def guarded(args: Namespace) -> bool:
    """Whether only those who may can reach the server: by vLLM's API key, or by this machine."""
    keys = getattr(args, "api_key", None) or [envs.VLLM_API_KEY]
    if any(keys) or getattr(args, "uds", None):
        return True
    host = getattr(args, "host", None) or "0.0.0.0"
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return bool(host == "localhost")


def require_guard(state: State, what: str) -> None:
    """Raises HTTPException 403 unless the application's `moet_guarded` is set.

    what: is to be changed, as the subject of the message.
    """
    if not state.moet_guarded:
        raise HTTPException(
            403,
            f"{what} can be changed over HTTP only where an API key guards the server, or where it "
            "listens on loopback alone: start it with --api-key or --host 127.0.0.1.",
        )
