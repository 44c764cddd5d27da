"""Calls to the policy servers, all at a time, beside the training thread.

Owns one event loop in a thread of its own. A call can be given up at once, whatever the server does.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any

import httpx
import msgspec

from contract.errors import PublishError
from contract.policy import (
    CONTENT_TYPE,
    HEALTH_ROUTE,
    UPDATE_ROUTE,
    ErrorInfo,
    VersionInfo,
    WeightUpdate,
    decode,
    encode,
)

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 5.0
"""Of a question that needs no work."""
_POLL_SECONDS = 0.2
_SEE_LOG = "the log of the policy server (logs/latest/inference.log) says more"


class Calls:
    """One running request to each server."""

    def __init__(self, futures: Sequence[Future[None]], deadline: float) -> None:
        self._futures = futures
        self._deadline = deadline

    def raise_failed(self, patience_seconds: float = 0.0) -> None:
        """
        Args:
            patience_seconds: longest wait for an answer.

        Raises:
            PublishError: a server has refused; says why.
        """
        wait(self._futures, patience_seconds, return_when="FIRST_EXCEPTION")
        reasons = [
            str(future.exception())
            for future in self._futures
            if future.done() and not future.cancelled() and future.exception() is not None
        ]
        if reasons:
            raise PublishError("; ".join(reasons))

    def finish(self) -> None:
        """Wait for all.

        Raises:
            PublishError: a server has refused, or does not answer in time.
        """
        # Each request watches its own time limit; this one is for a loop that does not turn.
        left = max(0.0, self._deadline - time.monotonic())
        self.raise_failed(left + _ANSWER_SECONDS)
        if not all(future.done() for future in self._futures):
            raise PublishError("the calls to the policy servers do not end; this is a defect of the trainer")

    def cancel(self) -> None:
        """Give up what is running."""
        for future in self._futures:
            future.cancel()


class PolicyServers:
    """The servers that get every version.

    Args:
        addresses: `http://host:port` of each.
        key: API key; None sends none.
    """

    def __init__(self, addresses: Sequence[str], key: str | None) -> None:
        self._addresses = [address.rstrip("/") for address in addresses]
        self._headers = {"Content-Type": CONTENT_TYPE}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="publish", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._addresses)

    def wait_until_up(self, deadline: float) -> None:
        """Wait until every server answers that it is well.

        Raises:
            PublishError: one does not before `deadline` (of `time.monotonic`).
        """
        calls = self._start([self._until_up(address, deadline) for address in self._addresses], deadline)
        calls.finish()

    def update(self, updates: Sequence[WeightUpdate], deadline: float) -> Calls:
        """Send each server its update; the server answers when it draws with the new weights."""
        pairs = zip(self._addresses, updates, strict=True)
        return self._start([self._update(address, update, deadline) for address, update in pairs], deadline)

    def close(self) -> None:
        """Give up what is running and end the thread."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(_ANSWER_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ANSWER_SECONDS)
        self._loop.close()

    def _start(self, coroutines: Sequence[Coroutine[Any, Any, None]], deadline: float) -> Calls:
        futures = [asyncio.run_coroutine_threadsafe(item, self._loop) for item in coroutines]
        return Calls(futures, deadline)

    async def _until_up(self, address: str, deadline: float) -> None:
        said = "nothing"
        async with self._client(_ANSWER_SECONDS) as client:
            while time.monotonic() < deadline:
                try:
                    response = await client.get(address + HEALTH_ROUTE)
                except httpx.HTTPError as error:
                    said = _words(error)
                else:
                    if response.status_code == httpx.codes.OK:
                        return
                    said = f"status {response.status_code}: {response.text[:500]}"
                await asyncio.sleep(_POLL_SECONDS)
        raise PublishError(
            f"policy server {address} is not up within publish.timeout_seconds (last answer: {said}); check "
            f"`servers`, or raise publish.timeout_seconds; {_SEE_LOG}"
        )

    async def _update(self, address: str, update: WeightUpdate, deadline: float) -> None:
        left = max(0.0, deadline - time.monotonic())
        refused = f"policy server {address} did not take version {update.version} and stays on the one before"
        try:
            async with asyncio.timeout(left), self._client(left) as client:
                response = await client.post(address + UPDATE_ROUTE, content=encode(update))
        except TimeoutError as error:
            raise PublishError(
                f"{refused}: it did not answer within publish.timeout_seconds; raise it if loading takes so "
                f"long; {_SEE_LOG}"
            ) from error
        except httpx.HTTPError as error:
            raise PublishError(f"{refused}: {_words(error)}; {_SEE_LOG}") from error
        found = _version_in(response)
        if found != update.version:
            raise PublishError(f"{refused}: it answered {_told(response)}; {_SEE_LOG}")

    def _client(self, timeout_seconds: float) -> httpx.AsyncClient:
        timeout = httpx.Timeout(timeout_seconds, connect=min(_CONNECT_SECONDS, timeout_seconds))
        # Proxies of the environment are for the outside world, not for servers of the run.
        return httpx.AsyncClient(headers=self._headers, timeout=timeout, trust_env=False)


def _version_in(response: httpx.Response) -> int | None:
    if response.status_code != httpx.codes.OK:
        return None
    try:
        return decode(response.content, VersionInfo).version
    except msgspec.DecodeError:
        return None


def _told(response: httpx.Response) -> str:
    """What a server answered, in words."""
    version = _version_in(response)
    if version is not None:
        return f"that it draws with version {version}"
    status = f"status {response.status_code}"
    try:
        return f"{status}: {decode(response.content, ErrorInfo).error}"
    except msgspec.DecodeError:
        return f"{status}: {response.text[:500]!r}, which is no answer of a policy server"


def _words(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "it does not answer in time"
    if isinstance(error, httpx.ConnectError):
        return f"it cannot be reached ({error})"
    return f"the connection broke ({error or type(error).__name__})"


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
