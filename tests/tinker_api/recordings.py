"""Requests that the real client sent, as a file: recorded_requests.json. Their session is SESSION, as long as any."""

from __future__ import annotations

import base64
import json
from pathlib import Path

FILE = Path(__file__).parent / "recorded_requests.json"
SESSION = "0123456789abcdef0123456789abcdef"


def to_rows(requests, session_id):
    """Rows of the file: (method, path, content type, body) of each request, but those that the client's clock alone decides on."""
    rows = []
    for http in requests:
        if not http.path.endswith(("/telemetry", "/session_heartbeat", "/client/dynamic_config")):
            path, body = http.path.replace(session_id, SESSION), http.body.replace(session_id.encode(), SESSION.encode())
            rows.append([http.method, path, http.headers.get("content-type", ""), base64.b64encode(body).decode()])
    return rows


def read_rows(session_id):
    """The recorded requests as those of another session."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    return [
        (method, path.replace(SESSION, session_id), kind, base64.b64decode(body).replace(SESSION.encode(), session_id.encode()))
        for method, path, kind, body in rows
    ]


def write_rows(rows):
    """Write the file, a row a line."""
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
