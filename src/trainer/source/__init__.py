"""Sources of step batches: data sets (SFT) now; a stream of rollouts has its place here."""
