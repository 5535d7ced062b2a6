"""A server with the layout of the Hugging Face Hub, for the tests of downloads: HF_ENDPOINT names it."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
LARGE = (".gguf", ".safetensors")  # in large-file storage, named by their SHA-256; others are named by their git hash


class HubServer(ThreadingHTTPServer):
    """Serves repositories: {"owner/repo": {"path": content}}. A context manager."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.requests: list[tuple[str, str]] = []
        """Method and path of each request."""

    @property
    def endpoint(self) -> str:
        """Value of HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"

    def downloads(self) -> list[str]:
        """Return the names of the files whose content was requested."""
        return [path.rsplit("/", 1)[1] for method, path in self.requests if method == "GET" and "/resolve/" in path]

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path))
        for repo_id, files in self.server.repositories.items():
            if path.startswith(f"/api/models/{repo_id}"):
                return self._describe(repo_id, files, path)
            for revision in ("main", COMMIT):
                if (name := path.removeprefix(f"/{repo_id}/resolve/{revision}/")) in files:
                    return self._file(name, files[name])
        self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound" if "/resolve/" in path else "RepoNotFound"})

    do_HEAD = do_GET

    def _describe(self, repo_id: str, files: dict[str, bytes], path: str) -> None:
        if "/tree/" in path:
            found: object = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
        else:
            found = {"id": repo_id, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        self._answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, content: bytes) -> None:
        large = name.endswith(LARGE)
        etag = (hashlib.sha256 if large else hashlib.sha1)(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        if large:
            headers |= {"X-Linked-ETag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        self._answer(200, content, headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""
