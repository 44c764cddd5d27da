"""The API key: without it nothing but the health of the server is told."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from contract.policy import HEALTH_ROUTE
from inference.refusal import Refused, answer_refusal


class ApiKey:
    """Middleware that answers 401 unless a request brings `Authorization: Bearer <key>`."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        """
        Args:
            key: None lets everybody in.
        """
        self._app = app
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._key is None or scope["type"] != "http" or scope["path"] == HEALTH_ROUTE:
            return await self._app(scope, receive, send)
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # In constant time, so that the answer's delay does not tell how much of a guess was right.
        is_right = hmac.compare_digest(given.strip().encode(), self._key)
        if scheme.lower() == "bearer" and is_right:
            return await self._app(scope, receive, send)
        message = (
            "this policy server asks for its API key: send the header `Authorization: Bearer <key>` with "
            "the api_key of the server's configuration"
        )
        answer = answer_refusal(scope["path"], Refused(401, message, code="invalid_api_key"))
        answer.headers["www-authenticate"] = "Bearer"
        await answer(scope, receive, send)
