"""What a user sees of a run: console, logs, metrics and their sinks. Imports neither torch nor transformers."""
