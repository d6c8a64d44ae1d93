"""Stands before a rank's own command (`hydra.launcher.wrapper`): notes the rank's pid, and may fail before the program.

It is started without site, and so takes a few hundredths of a second.
"""

from __future__ import annotations

import os
import sys

import fault_steps

fault_steps.note(f"pid_{fault_steps.JOB}_{fault_steps.RANK}")
fault_steps.at("start")
os.execv(sys.argv[1], sys.argv[1:])
