"""Config classes of a module beside the program."""

from dataclasses import dataclass
from enum import Enum


class Side(Enum):
    LEFT = "left"
    RIGHT = "right"


@dataclass
class Shape:
    side: Side = Side.LEFT
    corners: int = 4
