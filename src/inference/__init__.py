"""The policy server: draws tokens from the current policy over HTTP, and takes new weights in place."""
