"""Environments: what an episode asks, and what it is worth. User code runs in worker processes only."""

from orchestrator.environment.base import Environment, Message

__all__ = ["Environment", "Message"]
