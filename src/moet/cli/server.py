"""A server to talk to, and a `moet serve` process: started, awaited, asked, stopped."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from moet.closing import Closing
from moet.errors import MoetError

HOST = "127.0.0.1"


class Client(Closing):
    """Asks a server at `url` over HTTP. key: the API's, where the server wants one."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=self.url, timeout=120, headers=headers)

    def close(self) -> None:
        """Ends the connections."""
        self._http.close()

    def get(self, path: str) -> Any:
        """The JSON at `path`. Raises MoetError when there is no answer, or another one."""
        try:
            answer = self._http.get(path)
        except httpx.TransportError as error:
            raise MoetError(
                f"{self.url} does not answer: {error}.", "Is the server up, and this its address?"
            ) from None
        if answer.status_code != 200:
            hint = "Give --api-key." if answer.status_code == 401 else "Is it a server of moet's?"
            raise MoetError(f"{self.url}{path} answers {answer.status_code}.", hint)
        return answer.json()

    def healthy(self) -> bool:
        """Whether the server answers and serves."""
        with contextlib.suppress(httpx.TransportError):
            return self._http.get("/health").status_code == 200
        return False

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        """Pieces of text as the server streams them (server-sent events of the OpenAI API)."""
        request = {**body, "stream": True}
        with self._http.stream("POST", path, json=request) as answer:
            if answer.status_code != 200:
                raise MoetError(f"the server answered {answer.status_code}: {answer.read()!r}.")
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: ") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise MoetError(f"the server answered: {event['error']['message']}")
                for choice in event["choices"]:
                    yield choice.get("text") or choice.get("delta", {}).get("content") or ""


class Server(Client):
    """A context manager around `moet serve MODEL …` on a free port of the loopback interface.

    Args:
        arguments: of `moet serve`, the model first. log: file for the server's output.
        environment: the server's; patience: seconds that it may take to answer; key: of its API,
            if it is to want one.

    Raises MoetError with the end of the log when the server stops or does not answer in time.
    """

    def __init__(
        self,
        arguments: list[str],
        log: Path,
        environment: dict[str, str],
        patience: float = 300,
        key: str | None = None,
    ) -> None:
        port = _free_port()
        super().__init__(f"http://{HOST}:{port}", key)
        self._arguments = [*arguments, "--host", HOST, "--port", str(port)]
        self._arguments += [f"--api-key={key}"] if key else []
        self._log, self._environment, self._patience = log, environment, patience
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        command = [sys.executable, "-m", "moet", "serve", *self._arguments]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=self._environment
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Ends the server as Ctrl-C would, and forcibly when it does not end within 30 seconds."""
        super().close()
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait(self) -> None:
        assert self._process is not None
        end = time.monotonic() + self._patience
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise MoetError(f"the server stopped ({self._log}):\n{self._tail()}")
            if self.healthy():
                return
            time.sleep(0.2)
        raise MoetError(f"no answer after {self._patience:.0f} s ({self._log}):\n{self._tail()}")

    def _tail(self, lines: int = 15) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
