"""Why a request is refused, with its HTTP status; and the two forms in which clients are told."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from contract.errors import PolicyServerError
from contract.policy import CONTENT_TYPE, ErrorInfo, encode

OPENAI_PREFIX = "/v1"
"""Paths below it answer in OpenAI's form, also when they refuse."""

_OPENAI_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    422: "invalid_request_error",
}


class Refused(PolicyServerError):
    """A request that is not served.

    Attributes:
        status: of the HTTP answer, 400 or more.
        param: the field of an OpenAI request that is wrong; None is none in particular.
        code: OpenAI's short name of the reason, e.g. `model_not_found`.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def refuse_openai(message: str, param: str | None = None) -> Refused:
    """An OpenAI request that cannot be served as it stands."""
    return Refused(400, message, param=param)


def openai_error(refusal: Refused) -> dict[str, Any]:
    """In OpenAI's form."""
    other = "server_error" if refusal.status >= 500 else "invalid_request_error"
    kind = _OPENAI_TYPES.get(refusal.status, other)
    return {
        "error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code},
    }


def answer_refusal(path: str, refusal: Refused) -> Response:
    """What a client of `path` is told."""
    if path == OPENAI_PREFIX or path.startswith(f"{OPENAI_PREFIX}/"):
        return JSONResponse(openai_error(refusal), refusal.status)
    return Response(encode(ErrorInfo(str(refusal))), refusal.status, media_type=CONTENT_TYPE)
