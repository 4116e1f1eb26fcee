"""Routes of a fake server, and the answers that both servers give to a request without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from rollouts.testing.servers.http import Answer, Handler, Request, json_response
from rollouts.testing.servers.payloads import Refused

Routes: TypeAlias = Mapping[str, Mapping[str, Handler]]
"""Path -> method -> handler."""


async def answer(routes: Routes, request: Request, api_key: str | None) -> Answer:
    """Answer a request by its route, or say that it has no key, no path or no method. A refusal becomes its response.

    Args:
        api_key: key that the request must have; None = it needs none.
    """
    if api_key is not None and request.headers.get("authorization") != f"Bearer {api_key}":
        return json_response({"error": "Unauthorized"}, 401)
    methods = routes.get(request.path)
    if methods is None:
        return json_response({"detail": "Not Found"}, 404)
    if request.method not in methods:
        return json_response({"detail": "Method Not Allowed"}, 405)
    try:
        return await methods[request.method](request)
    except Refused as refused:
        return refused.response
