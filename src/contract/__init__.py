"""What crosses a process boundary: errors, settings, batches, packing, the run folder. Imports no torch."""
