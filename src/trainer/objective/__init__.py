"""Losses over packed rows, normalised by global token counts."""
