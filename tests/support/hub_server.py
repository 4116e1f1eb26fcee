"""A stand-in of the Hugging Face hub on loopback: the part of its HTTP API with which huggingface_hub reads and writes models."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7"  # of no account


@dataclass
class Hub:
    """The models of a hub, and the requests that it got."""

    url: str = ""
    models: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)  # files by name, commit and path
    branches: dict[str, dict[str, str]] = field(default_factory=dict)  # commit by name and branch
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)  # method and path
    tokens: set[str | None] = field(default_factory=set)  # Authorization headers

    def add(self, name: str, directory: Path, branch: str = "main") -> str:
        """Add the files of a directory as a new commit of a model, and return the commit."""
        files = {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}
        return self.commit(name, files, branch)

    def commit(self, name: str, files: dict[str, bytes], branch: str = "main") -> str:
        before = self.branches.get(name, {}).get(branch)
        files = {**(self.models[name][before] if before else {}), **files}
        digest = hashlib.sha1(f"{name}{branch}{len(self.models.get(name, {}))}{sorted(files)}".encode()).hexdigest()
        self.models.setdefault(name, {})[digest] = files
        self.branches.setdefault(name, {})[branch] = digest
        return digest

    def files(self, name: str) -> dict[str, bytes]:
        """Return the files of a model's main branch."""
        return self.models[name][self.branches[name]["main"]]

    def find(self, name: str, revision: str) -> str | None:
        commit = self.branches.get(name, {}).get(revision, revision)
        return commit if commit in self.models.get(name, {}) else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *args: Any) -> None:
        self.hub = hub
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._record()
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if parts[:2] == ["api", "models"]:
            name, what, revision = "/".join(parts[2:4]), (parts[4:5] or ["revision"])[0], (parts[5:6] or ["main"])[0]
            commit = self._find(name, revision)
            if commit is None:
                return
            files = self.hub.models[name][commit]
            if what == "tree":
                self._json([{"type": "file", "path": path, "size": len(data), "oid": _oid(data)} for path, data in files.items()])
            else:
                self._json({"id": name, "modelId": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]})
        elif len(parts) >= 5 and parts[2] == "resolve":
            name, path = "/".join(parts[:2]), "/".join(parts[4:])
            commit = self._find(name, parts[3])
            if commit is None:
                return
            if name in self.hub.gated:
                self._error(403, "GatedRepo", "Access to this model is restricted.")
            elif path not in self.hub.models[name][commit]:
                self._error(404, "EntryNotFound", "Entry not found")
            else:
                data = self.hub.models[name][commit][path]
                self._send(200, data, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"})
        else:
            self._error(404, "RepoNotFound", "Repository not found")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._record()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path).path.strip("/").split("/")
        if not self.headers.get("Authorization"):
            self._error(401, "", "Invalid username or password.")
        elif parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = "/".join(filter(None, [asked.get("organization") or "me", asked["name"]]))
            self.hub.models.setdefault(name, {})
            self.hub.branches.setdefault(name, {})
            self._json({"url": f"{self.hub.url}/{name}", "id": name, "name": name})
        elif parts[4:5] == ["preupload"]:
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]]
            self._json({"files": files})
        elif parts[4:5] == ["commit"]:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"}
            name = "/".join(parts[2:4])
            commit = self.hub.commit(name, files)
            self._json(
                {"commitUrl": f"{self.hub.url}/{name}/commit/{commit}", "commitOid": commit, "pullRequestUrl": None, "hookOutput": ""}
            )
        elif parts == ["api", "validate-yaml"]:
            self._json({"errors": [], "warnings": []})
        else:
            self._error(404, "RepoNotFound", "Repository not found")

    def _find(self, name: str, revision: str) -> str | None:
        if name not in self.hub.models:
            self._error(401, "", "Invalid username or password.")  # as the hub answers for private and unknown models
            return None
        commit = self.hub.find(name, revision)
        if commit is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def _record(self) -> None:
        self.hub.requests.append(f"{self.command} {urlsplit(self.path).path}")
        self.hub.tokens.add(self.headers.get("Authorization"))

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, message: str) -> None:
        self._send(status, json.dumps({"error": message}).encode(), {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _oid(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


@contextmanager
def serve_hub() -> Generator[Hub]:
    """Serve a hub without models on a loopback port for the length of the block."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
