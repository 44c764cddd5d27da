"""What a user sees of a run: console, logs, metrics and their sinks.

Imports neither torch nor transformers, and of the project `contract` only: what the configuration says comes
in as plain arguments.
"""
