"""A model hub on this machine: as much of the Hugging Face hub's HTTP API as downloads need.

`GET /api/models/OWNER/NAME[/revision/REV]`, `GET /api/models/OWNER/NAME/tree/REV`, and `HEAD` and
`GET`, whole or by range, of `/OWNER/NAME/resolve/REV/FILE`.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlparse

CHUNK = 1 << 16


class HubServer(ThreadingHTTPServer):
    """Serves the files of `path` as the repository `name`.

    Attributes:
        url: the endpoint. commit: the repository's. sent: bytes sent of each file. requests: (verb,
            file, range or None), in order. pace: seconds to wait after each 64 KiB. broken: files
            that are answered with status 500.
    """

    daemon_threads = True

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.path, self.name = path, name
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.commit = hashlib.sha1(name.encode()).hexdigest()
        self.sent: dict[str, int] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.pace = 0.0
        self.broken: set[str] = set()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is killed in the middle of a download is what some tests are about."""


@contextmanager
def hub_server(path: Path, name: str = "owner/tiny") -> Iterator[HubServer]:
    server = HubServer(path, name)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        path, hub = urlparse(self.path).path, self.server
        api = f"/api/models/{hub.name}"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{hub.commit}"):
            about = {"id": hub.name, "sha": hub.commit, "private": False, "tags": []}
            self._json(about | {"siblings": self._files("rfilename")})
        elif path.startswith(f"{api}/tree/"):
            self._json([{"type": "file", "oid": "0" * 40} | of for of in self._files("path")])
        elif match := re.fullmatch(f"/{hub.name}/resolve/(main|{hub.commit})/([^/]+)", path):
            self._file(match[2], body)
        else:
            self._empty(404, {"X-Error-Code": "RepoNotFound"})

    def _files(self, key: str) -> list[dict[str, object]]:
        return [
            {key: file.name, "size": file.stat().st_size}
            for file in sorted(self.server.path.iterdir())
            if file.is_file()
        ]

    def _file(self, name: str, body: bool) -> None:
        hub, path = self.server, self.server.path / name
        wanted = self.headers.get("Range")
        hub.requests.append(("GET" if body else "HEAD", name, wanted))
        if not path.is_file():
            return self._empty(404, {"X-Error-Code": "EntryNotFound"})
        if name in hub.broken:
            return self._empty(500, {})
        content = path.read_bytes()
        first, last = 0, len(content) - 1
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or ""):
            first, last = int(match[1]), min(last, int(match[2] or last))
        self.send_response(206 if match else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", hub.commit)
        self.send_header("Accept-Ranges", "bytes")
        if match:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        for start in range(first, last + 1, CHUNK) if body else ():
            chunk = content[start : min(start + CHUNK, last + 1)]
            self.wfile.write(chunk)
            hub.sent[name] = hub.sent.get(name, 0) + len(chunk)
            if hub.pace:
                threading.Event().wait(hub.pace)
        return None

    def _json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _empty(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()
