"""The smallest rank: it stores a good outcome and ends, whatever its command says. Run by many_jobs.py."""

import os
import pickle
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import dump
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import Outcome

run_id = os.environ["TORCHELASTIC_RUN_ID"]
folder = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
part = os.path.join(folder, ".part")
outcome = Outcome(completed=True, value=pickle.dumps(int(os.environ["HYDRA_DDP_JOB_NUM"])), run_id=run_id)
Path(part).write_bytes(dump(outcome))
os.rename(part, os.path.join(folder, f"outcome_{os.environ['RANK']}.pkl"))
