"""Processes, device mesh, sharding and the collectives that the loop needs."""
