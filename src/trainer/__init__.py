"""The training process: model shards, optimizer, data position and the checkpoint manager."""
