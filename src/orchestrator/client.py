"""Calls to the policy servers: draws, and the version of the policy that draws.

Owns the connections, the choice of a server, and patience. A server that cannot be reached or answers 5xx is
out of reach: requests go to the others, or wait and try again, and once it has been out of reach for
`server_patience_seconds` every request that meets it fails. Ending the task of a request closes its
connection, by which the server knows that it is not wanted any more. Every draw names the run, so that no
token of another run's weights comes back.

A draw that fails for a reason of its own raises `EpisodeFailed`; `PolicyServerError` is for what no other
request would escape.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from types import TracebackType
from typing import TypeVar

import aiohttp
import msgspec

from contract import policy
from contract.errors import PolicyServerError
from contract.policy import GenerateRequest, GenerateResponse, Sampling, VersionInfo
from orchestrator.environment.failure import EpisodeFailed

Answer = TypeVar("Answer", GenerateResponse, VersionInfo)

_CONNECT_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0
_POLL_SECONDS = 30.0
"""Longest single wait for a version; a longer one is several requests."""
_UNUSABLE = frozenset({401, 403, 404, 405})
"""Statuses that say that the address or the key is wrong, which no other request would escape."""


class _OutOfReach(Exception):
    """No answer, or one that says that the server cannot answer now."""


class _Refused(Exception):
    """The server refuses this request."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class _Server:
    """One server: its load, and for how long it has been out of reach."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self.load = 0
        self.retry_at = 0.0
        self.lost_at: float | None = None
        self._pause = _FIRST_PAUSE_SECONDS

    def note_success(self) -> None:
        self.lost_at = None
        self.retry_at = 0.0
        self._pause = _FIRST_PAUSE_SECONDS

    def note_failure(self, started: float) -> None:
        """After a request sent at `started`. Of many that fail together, one makes the pause longer."""
        now = time.monotonic()
        if self.lost_at is None:
            self.lost_at = now
        elif started < self.retry_at:
            return
        self.retry_at = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)


class PolicyClient:
    """One or several policy servers; each request goes to the least loaded one within reach.

    Made and used within one event loop; close it at the end, or use it as an asynchronous context manager.
    """

    def __init__(
        self,
        servers: Iterable[str],
        *,
        api_key: str | None = None,
        request_timeout_seconds: float = 3600.0,
        server_patience_seconds: float = 60.0,
        run_id: str = "",
    ) -> None:
        """
        Args:
            servers: `http://host:port` of each, at least one.
            api_key: sent as bearer token; None sends none.
            request_timeout_seconds: longest wait for one draw; retries and the server's queue count.
            server_patience_seconds: longest time for which a server may be out of reach.
            run_id: run whose weights must draw; empty takes any.
        """
        self._servers = [_Server(address) for address in servers]
        if not self._servers:
            raise ValueError("a PolicyClient needs at least one server")
        self._request_timeout = request_timeout_seconds
        self._patience = server_patience_seconds
        self._run_id = run_id
        headers = {"Content-Type": policy.CONTENT_TYPE, "Accept": policy.CONTENT_TYPE}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._session = aiohttp.ClientSession(
            # As many connections as requests: the orchestrator bounds those.
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            # A draw has its own limit, below; a connection that does not come about is a server out of reach.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        )
        self._next = 0
        self.num_retries = 0
        """Requests that were sent again after a server was out of reach."""

    async def __aenter__(self) -> PolicyClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections, those of running requests too."""
        await self._session.close()

    async def generate(self, prompt: list[int], sampling: Sampling, request_id: str) -> GenerateResponse:
        """Draw one sequence.

        Raises:
            EpisodeFailed: it took longer than `request_timeout_seconds` (`timeout`); the server refuses this
                request, or its answer is none (`server`).
            PolicyServerError: a server is out of reach for too long, refuses every request, or has the
                weights of another run.
        """
        try:
            async with asyncio.timeout(self._request_timeout):
                return await self._generate(prompt, sampling, request_id)
        except TimeoutError:
            raise EpisodeFailed(
                "timeout",
                f"a draw from {len(prompt)} prompt tokens was not finished within "
                f"rollout.request_timeout_seconds = {self._request_timeout:g}",
            ) from None

    async def _generate(self, prompt: list[int], sampling: Sampling, request_id: str) -> GenerateResponse:
        attempt, first_failure = 0, None
        while True:
            server = self._pick()
            if server is None:
                await self._wait_for_retry()
                continue
            # The server may not have seen yet that an earlier attempt's connection is gone.
            sent_id = request_id if attempt == 0 else f"{request_id}.{attempt}"
            started = time.monotonic()
            try:
                body = policy.encode(GenerateRequest(sent_id, prompt, sampling, self._run_id))
                url = server.address + policy.GENERATE_ROUTE
                answer = await self._ask(server, "POST", url, GenerateResponse, body)
            except _OutOfReach as error:
                attempt += 1
                first_failure = first_failure or time.monotonic()
                self._note_failure(server, started, error)
                if time.monotonic() - first_failure > self._patience:
                    # Others get through: it is this request that the server cannot answer.
                    raise EpisodeFailed(
                        "server", f"no answer from {server.address} in {attempt} attempts: {error}"
                    ) from error
                continue
            except _Refused as error:
                if error.status == policy.OTHER_RUN:
                    raise _taken(server, str(error)) from error
                if error.status in _UNUSABLE:
                    raise _unusable(server, error) from error
                raise EpisodeFailed("server", f"{server.address} refuses a draw with {error}") from error
            if answer.request_id != sent_id:
                raise EpisodeFailed(
                    "server",
                    f"{server.address} answers request {answer.request_id!r} in place of {sent_id!r}",
                )
            return answer

    async def weights(self) -> dict[str, VersionInfo]:
        """What draws now, by the address of each server.

        Raises:
            PolicyServerError: a server is out of reach for too long, or refuses to say.
        """
        return await self._ask_all(0, 0.0, any_run=True)

    async def wait_for_version(self, at_least: int, timeout_seconds: float) -> int:
        """The lowest version of all servers, as soon as that is `at_least`, or after `timeout_seconds`.

        Raises:
            PolicyServerError: a server is out of reach for too long, refuses to say, or has the weights of
                another run.
        """
        found = await self._ask_all(at_least, timeout_seconds, any_run=False)
        return min(info.version for info in found.values())

    async def _ask_all(
        self, at_least: int, timeout_seconds: float, *, any_run: bool
    ) -> dict[str, VersionInfo]:
        deadline = time.monotonic() + timeout_seconds
        waits = [
            asyncio.create_task(self._wait_for_version(server, at_least, deadline, any_run))
            for server in self._servers
        ]
        try:
            found = await asyncio.gather(*waits)
        finally:
            # If one failed the others go on waiting otherwise.
            for wait in waits:
                wait.cancel()
        return {server.address: info for server, info in zip(self._servers, found, strict=True)}

    async def _wait_for_version(
        self, server: _Server, at_least: int, deadline: float, any_run: bool
    ) -> VersionInfo:
        while True:
            started = time.monotonic()
            wait = min(max(deadline - started, 0.0), _POLL_SECONDS)
            query = f"at_least={at_least}&timeout_seconds={wait:.3f}"
            url = f"{server.address}{policy.VERSION_ROUTE}?{query}"
            try:
                # A server that does not answer when the wait is over has lost the request.
                async with asyncio.timeout(wait + _CONNECT_SECONDS):
                    answer = await self._ask(server, "GET", url, VersionInfo)
            except (_OutOfReach, TimeoutError) as error:
                self._note_failure(server, started, error)
                await asyncio.sleep(max(server.retry_at - time.monotonic(), 0.0))
                continue
            except _Refused as error:
                raise _unusable(server, error) from error
            if self._run_id and answer.origin.run_id != self._run_id and not any_run:
                whose = f"run {answer.origin.run_id}" if answer.origin.run_id else "no run"
                raise _taken(server, f"it has version {answer.version} of {whose}")
            if answer.version >= at_least or time.monotonic() >= deadline:
                return answer

    def _pick(self) -> _Server | None:
        """The least loaded server within reach, in turn among equals; None if there is none now."""
        now = time.monotonic()
        best = None
        for offset in range(len(self._servers)):
            index = (self._next + offset) % len(self._servers)
            server = self._servers[index]
            if server.retry_at <= now and (best is None or server.load < self._servers[best].load):
                best = index
        if best is None:
            return None
        self._next = (best + 1) % len(self._servers)
        return self._servers[best]

    async def _wait_for_retry(self) -> None:
        soonest = min(server.retry_at for server in self._servers)
        await asyncio.sleep(max(soonest - time.monotonic(), 0.0))

    def _note_failure(self, server: _Server, started: float, error: Exception) -> None:
        """Raises `PolicyServerError` once the patience with `server` is at its end."""
        self.num_retries += 1
        server.note_failure(started)
        lost_at = server.lost_at
        if lost_at is not None and time.monotonic() - lost_at > self._patience:
            raise PolicyServerError(
                f"the policy server {server.address} has been out of reach for longer than "
                f"rollout.server_patience_seconds = {self._patience:g}; the last error was: "
                f"{str(error) or type(error).__name__}"
            ) from error

    async def _ask(
        self, server: _Server, method: str, url: str, kind: type[Answer], body: bytes | None = None
    ) -> Answer:
        server.load += 1
        try:
            async with self._session.request(method, url, data=body) as response:
                content = await response.read()
                status = response.status
        except (aiohttp.ClientError, OSError) as error:
            raise _OutOfReach(f"{type(error).__name__}: {error}") from error
        finally:
            server.load -= 1
        if status >= 500:
            raise _OutOfReach(f"status {status}: {_error_text(content)}")
        server.note_success()
        if status >= 400:
            raise _Refused(status, _error_text(content))
        try:
            return policy.decode(content, kind)
        except msgspec.DecodeError as error:
            raise _Refused(status, f"an answer that is no {kind.__name__} ({error})") from error


def _unusable(server: _Server, error: _Refused) -> PolicyServerError:
    return PolicyServerError(
        f"the policy server {server.address} answers {error}; check the address (servers) and the key "
        f"(server_key), and that it is a server of the same version of Tailrace"
    )


def _taken(server: _Server, told: str) -> PolicyServerError:
    return PolicyServerError(
        f"the policy server {server.address} does not have the weights of this run any more ({told}): "
        f"another run has taken it, or it was started again. One run at a time uses a server: give each its "
        f"own (servers), and go on with --resume"
    )


def _error_text(content: bytes) -> str:
    """What a server says about an error: `ErrorInfo`, or the start of whatever it is."""
    try:
        return policy.decode(content, policy.ErrorInfo).error
    except msgspec.DecodeError:
        return content[:500].decode(errors="replace") or "without a text"
