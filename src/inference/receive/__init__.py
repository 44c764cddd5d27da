"""How new weights come in."""
