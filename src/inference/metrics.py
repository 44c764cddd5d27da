"""Prometheus metrics of the policy server: what the engine counts, and what requests took.

Every server has a registry of its own, so that several can live in one process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.service import PolicyService

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The metrics of one server, and the middleware that measures its requests.

    Request times are from the first byte of a request to the last of its answer. A request whose client went
    away counts with status 499.
    """

    def __init__(self, service: PolicyService) -> None:
        self._routes: frozenset[str] = frozenset()
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(service))
        self._requests = Counter(
            "policy_requests", "Answered requests.", ["route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "policy_request_seconds",
            "Time from request to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._first_byte = Histogram(
            "policy_first_byte_seconds",
            "Time from request to the start of its answer: to the first token, where tokens are streamed.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )

    def know(self, routes: Iterable[str]) -> None:
        """Count requests of these paths under their names; all others are `other`."""
        self._routes = frozenset(routes)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """`app`, measured."""

        async def measured(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            route = scope["path"] if scope["path"] in self._routes else "other"
            began = time.monotonic()
            status = 499

            async def note(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                    self._first_byte.labels(route).observe(time.monotonic() - began)
                await send(message)

            try:
                await app(scope, receive, note)
            finally:
                self._requests.labels(route, str(status)).inc()
                self._seconds.labels(route).observe(time.monotonic() - began)

        return measured


class _EngineCollector:
    """Reads the engine's counters when they are asked for."""

    def __init__(self, service: PolicyService) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        engine = self._service.engine
        stats = engine.stats()
        gauges = {
            "policy_running_requests": ("Sequences being drawn.", stats.num_running),
            "policy_waiting_requests": ("Sequences that wait.", self._service.num_waiting),
            "policy_version": ("Policy version that draws tokens.", self._service.weights.version),
            "policy_paused": ("1 while a pause is in force.", int(engine.is_paused)),
            "policy_updating": ("1 while weights are being loaded.", int(self._service.is_updating)),
        }
        counters = {
            "policy_prompt_tokens": ("Tokens of prompts.", stats.num_prompt_tokens),
            "policy_drawn_tokens": ("Tokens drawn.", stats.num_drawn_tokens),
            "policy_prefills": ("Prompts computed; a shared prompt counts once.", stats.num_prefills),
            "policy_updates": ("Weights loaded.", stats.num_updates),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
