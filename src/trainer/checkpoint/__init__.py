"""Saving and loading the whole state of training; one manager per process."""
