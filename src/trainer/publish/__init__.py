"""Weights out: every new policy version to the policy servers."""
