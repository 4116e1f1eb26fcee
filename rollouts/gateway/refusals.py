"""Refusals of a gateway's requests, and the JSON of their bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from rollouts.checks import check_encodable, parse_json, refuse_constant
from rollouts.errors import RolloutsError

Body: TypeAlias = "Mapping[str, Any]"


class Refusal(RolloutsError):
    """A request that gets an error status instead of an answer. Its message is for the client."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """
        Args:
            status: HTTP status, from 400.
            param: field of the request that is at fault, such as "messages[2].content"; None = no single one.
            code: reason in one word; None = the status says it.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def parse_body(data: bytes) -> Body:
    """Return the JSON object of a request. Raises Refusal (400) for anything else."""
    try:
        body = parse_json(data.decode("utf-8"), parse_constant=refuse_constant)
        if b"\\u" in data:
            check_encodable(body)
    except UnicodeError:
        raise Refusal(400, "the body is not UTF-8, or has half of a surrogate pair in it", code="invalid_json") from None
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Refusal(400, f"the body is a {type(body).__name__}, expected a JSON object", code="invalid_json")
    return cast("dict[str, Any]", body)
