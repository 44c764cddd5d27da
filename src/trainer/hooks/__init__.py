"""What happens beside the update: validation, export, samples, profiling, housekeeping."""
