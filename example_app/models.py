"""Two small classifiers for 8x8 grey images of the ten digits."""

from __future__ import annotations

from torch import nn


def mlp(hidden: int) -> nn.Module:
    """Return a network with one hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def cnn(channels: int) -> nn.Module:
    """Return a network with two convolutions."""
    return nn.Sequential(
        nn.Conv2d(1, channels, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * channels * 4 * 4, 10),
    )
