"""The way of rollout batches from the orchestrator to the trainer."""
