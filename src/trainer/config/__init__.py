"""Configuration of the trainer. Torch-free: `--help` and `--dry-run` answer at once.

Every field is described where it is declared; `--help` and the reference page are made from these texts.
"""

from trainer.config.rl import RLTrainConfig
from trainer.config.run import SFTConfig
from trainer.config.train import TrainConfig

__all__ = ["RLTrainConfig", "SFTConfig", "TrainConfig"]
