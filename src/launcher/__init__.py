"""Commands that start, watch and end the processes of a run. Imports neither torch nor transformers."""
