"""Run every job of a Hydra multirun as one group of DDP ranks.

The rooms are folders without __init__.py, so that Hydra's plugin scan, which imports every module that it sees, does
not see them.
"""

__version__ = "0.1.0"
