"""Optimizers whose state lives in host memory."""
