"""Frozen, strict configuration classes, and how they are read from TOML files and flags."""

from contract.settings.base import Settings

__all__ = ["Settings"]
