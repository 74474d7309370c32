"""A local HTTP server that answers like the hub, for what a planner asks of it."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "5e" * 20


@dataclass
class Hub:
    """url: its address. sent: bytes of file content that it has sent. asked: paths, in order."""

    url: str
    root: Path
    gated: bool = False
    sent: int = 0
    asked: list[str] = field(default_factory=list)


@contextmanager
def serve_hub(root: Path) -> Iterator[Hub]:
    """Serves the repositories under `root`, OWNER/NAME each, on the loopback interface."""
    hub = Hub("", root)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            hub.asked.append(self.path)
            match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/([^?]+)(?:\?.*)?", self.path)
            repository = match and root / match[1]
            if repository is None or not repository.is_dir():
                return self._refuse(404, "RepoNotFound")
            if hub.gated:
                return self._refuse(403, "GatedRepo")
            file = repository / match[2]
            if not file.is_file():
                return self._refuse(404, "EntryNotFound")
            size = file.stat().st_size
            first, last = 0, size - 1
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if span:
                first, last = int(span[1]), min(int(span[2]), size - 1)
            self.send_response(206 if span else 200)
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("ETag", f'"{hashlib.sha1(str(file).encode()).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if span:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.end_headers()
            if body:
                with file.open("rb") as content:
                    content.seek(first)
                    hub.sent += self.wfile.write(content.read(last - first + 1))
            return None

        def _refuse(self, code: int, what: str) -> None:
            self.send_response(code)
            self.send_header("X-Error-Code", what)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
