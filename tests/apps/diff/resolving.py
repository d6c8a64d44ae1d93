"""Values that are new each time they are asked for: `now`, and the user's own cached and uncached resolvers."""

import os
import uuid
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from observe import attempt, observe
from omegaconf import DictConfig, OmegaConf

register = OmegaConf.register_new_resolver


def random_name(*_: object) -> str:
    """The test knows random names by this form, and puts a number in the place of each."""
    return f"rnd{uuid.uuid4().hex[:12]}"


register("random", random_name, use_cache=True)
register("uncached", random_name, use_cache=False)
register("random_list", lambda n: [random_name() for _ in range(n)], use_cache=True)
register("job_num", lambda: HydraConfig.get().job.num, use_cache=True)
register("run_dir", lambda: HydraConfig.get().runtime.output_dir, use_cache=True)
register("dirname", lambda: HydraConfig.get().job.override_dirname, use_cache=True)
register("fails", lambda: 1 / 0, use_cache=True)
register("no_fail", lambda: "fine", use_cache=True)
register("plus", lambda a, b: a + b)
register("root_keys", lambda *, _root_: len(_root_))
register("cached_env", os.environ.get, use_cache=True)
register("upper", str.upper, use_cache=True)


@hydra.main(version_base="1.3", config_path="conf_random", config_name="config")
def main(cfg: DictConfig) -> None:
    register("late", lambda: "registered in the job", use_cache=True, replace=True)
    drawn: dict[str, Any] = OmegaConf.to_container(cfg.drawn, resolve=True)
    observe(
        cfg,
        drawn={key: repr(value) for key, value in drawn.items()},
        again=attempt(lambda: OmegaConf.to_container(cfg.drawn, resolve=True) == drawn),
        late=attempt(lambda: cfg.late),
        subdir=os.path.basename(HydraConfig.get().runtime.output_dir),
        run_dir_is=cfg.of_job.run_dir == HydraConfig.get().runtime.output_dir,
    )


if __name__ == "__main__":
    register("in_main", lambda: "registered under the guard " + random_name(), use_cache=True)
    main()
