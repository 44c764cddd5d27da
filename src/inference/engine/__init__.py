"""Engines behind the policy server."""
