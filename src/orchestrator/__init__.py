"""The orchestrator: from tasks to the batches that the trainer trains on. Imports no torch."""
