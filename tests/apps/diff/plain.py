"""A config of YAML files and groups; the job also composes configs of its own and reads a file of the project."""

import logging
import os
from pathlib import Path

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime
from hydra.utils import get_original_cwd
from observe import attempt, nodes, observe
from omegaconf import DictConfig

log = logging.getLogger(__name__)

if "DIFF_CHDIR" in os.environ:  # Some programs leave the folder they were started in before Hydra begins.
    os.chdir(os.environ["DIFF_CHDIR"])


@hydra.main(version_base=os.environ.get("DIFF_VERSION_BASE", "1.3"), config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    log.info("lr %s", cfg.lr)
    composed = {}
    for choice in ("cnn", "mlp", "other", "extra", "found"):
        try:
            composed[choice] = nodes(compose(config_name="config", overrides=[f"model={choice}", "lr=9"]))
        except Exception as error:  # Which groups can be found is what is compared.
            composed[choice] = {"error": {"type": type(error).__name__, "text": str(error)}}
    # A Hydra of the job's own, after which all is put back as it was: the basic launcher's next job needs it.
    programs_own = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    own_conf = str(Path(__file__).parent.absolute() / "own_conf")
    as_now = {"job_name": JobRuntime.instance().get("name"), "version_base": HydraConfig.get().runtime.version_base}
    with initialize_config_dir(own_conf, **as_now):
        composed["by_itself"] = nodes(compose(config_name="own"))
    GlobalHydra.instance().initialize(programs_own)
    observe(
        cfg,
        composed=composed,
        data=attempt(lambda: Path(get_original_cwd(), "data.txt").read_text()),
        data_here=attempt(lambda: Path("data.txt").read_text()),
    )


if __name__ == "__main__":
    main()
