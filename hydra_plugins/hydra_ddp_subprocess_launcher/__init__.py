"""Run every job of a Hydra multirun as one group of DDP ranks.

The folders in here have no `__init__.py`, so that Hydra's plugin scan, which imports every package, skips them.
"""

__version__ = "0.1.0"
