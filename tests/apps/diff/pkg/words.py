"""An Enum of the package."""

from enum import Enum


class Word(Enum):
    YES = "yes"
