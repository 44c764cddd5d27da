"""Configuration of the trainer, one module beside each owner. Imports no torch, so that `--help` answers at
once.
"""

from trainer.config.run import SFTConfig

__all__ = ["SFTConfig"]
