"""Packaging. Tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

PACKAGE = "hydra_plugins.hydra_ddp_subprocess_launcher"
ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / PACKAGE.replace(".", "/") / "__init__.py").read_text()).group(1)

setup(
    name="hydra-ddp-subprocess-launcher",
    version=VERSION,
    description="Hydra launcher that runs every job of a multirun as one group of DDP ranks",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_namespace_packages(include=["hydra_plugins.*"]),
    package_data={PACKAGE: ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["hydra-core>=1.3.2,<1.5", "omegaconf>=2.3", "cloudpickle>=3.0", "rich>=13", "nvidia-ml-py>=12"],
    extras_require={
        "example": ["torch>=2.2", "scikit-learn>=1.3"],
        "submitit": ["hydra-submitit-launcher>=1.2"],
        "timeline": ["matplotlib>=3.6"],
        "dev": [
            "accelerate>=1",
            "build>=1",
            "coverage>=7.10",
            "hydra-colorlog>=1.2",
            "hydra-optuna-sweeper>=1.2",
            "hydra-submitit-launcher>=1.2",
            "hydra-zen>=0.13",
            "hypothesis>=6.90",
            "lightning>=2.4",
            "matplotlib>=3.6",
            "mypy>=1.10",
            "nox>=2024.4",
            "pandas>=2",
            "pexpect>=4.9",
            "pre-commit>=3",
            "pyte>=0.8",
            "pytest>=8",
            "pytest-timeout>=2.2",
            "pytest-xdist>=3.6",
            "ruff>=0.6",
            "transformers>=4.45",
        ],
    },
    entry_points={
        "console_scripts": [f"hydra-ddp = {PACKAGE}.cli.main:main"],
        # Hydra 1.4 finds plugins by these, 1.3 by scanning the namespace.
        "hydra.plugins": [
            f"ddp_subprocess = {PACKAGE}.plugins:DDPSubprocessLauncher",
            f"ddp_submitit_slurm = {PACKAGE}.plugins:DDPSubmititSlurmLauncher",
            f"ddp_submitit_local = {PACKAGE}.plugins:DDPSubmititLocalLauncher",
            f"ddp_launcher_hint = {PACKAGE}.plugins:DDPLauncherHint",
            f"ddp_rank = {PACKAGE}.plugins:DDPRankSweeper",
        ],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
