"""The smallest rank: it stores a good outcome and ends, whatever its command says. Run by many_jobs.py."""

import os
import pickle
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import JobPaths, write_outcome
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import Outcome

value = pickle.dumps(int(os.environ["HYDRA_DDP_JOB_NUM"]))
# <run dir>/.ddp/<run id>/attempt_<restarts>/<rank>/error.json
run_dir = str(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[4])
outcome = Outcome(completed=True, value=value, run_id=os.environ["TORCHELASTIC_RUN_ID"])
write_outcome(JobPaths(run_dir), int(os.environ["RANK"]), outcome)
