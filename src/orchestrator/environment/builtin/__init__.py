"""Environments that come with the project: small verifiable tasks, made from a seed, without any data."""
