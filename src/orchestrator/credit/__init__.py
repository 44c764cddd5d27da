"""From the rewards of a group to the advantage of each episode."""
