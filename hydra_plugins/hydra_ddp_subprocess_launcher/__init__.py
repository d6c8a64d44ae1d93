"""Run every job of a Hydra multirun as one group of DDP ranks."""

__version__ = "0.1.0"
