"""What a job can see of its config and of Hydra, written down as JSON for test_differential.py."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hydra import version
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime
from hydra.utils import get_original_cwd, to_absolute_path
from omegaconf import Container, DictConfig, ListConfig, Node, OmegaConf


def name_of(kind: object) -> str:
    """A class by module and name, a type hint by its text: neither holds an address in memory."""
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else repr(kind)


def text_of(value: object) -> str:
    """The `repr` without addresses in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def attempt(look: Callable[[], object]) -> str:
    """The text of what `look` gives; that it fails, and how, is an observation, too."""
    try:
        return text_of(look())
    except Exception as error:
        return f"{name_of(type(error))}: {error}"


def tree(node: Node) -> Iterator[Node]:
    yield node
    if not isinstance(node, Container) or node._is_none() or node._is_missing() or node._is_interpolation():
        return
    keys = list(node.keys()) if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        child = node._get_node(key)
        assert isinstance(child, Node)
        yield from tree(child)


def facts(node: Node) -> dict[str, str]:
    """All that OmegaConf stores with one node: two equal tables behave alike."""
    raw = node._value()
    meta = node._metadata
    found = {
        "node": type(node).__name__,
        "key": repr(node._key()),
        "type": name_of(OmegaConf.get_type(node)),
        "ref_type": name_of(meta.ref_type),
        "object_type": name_of(meta.object_type),
        "optional": str(meta.optional),
        "flags": repr(sorted(meta.flags.items()) if meta.flags else []),
        "readonly": str(OmegaConf.is_readonly(node)),  # The effective value: inherited, too.
        "struct": str(OmegaConf.is_struct(node)),
        "interpolation": str(node._is_interpolation()),
        "missing": str(node._is_missing()),
        "parent": attempt(lambda: node._get_parent()._get_full_key("")),
    }
    if isinstance(node, (DictConfig, ListConfig)):
        found["element_type"] = name_of(meta.element_type)
        found["key_type"] = name_of(getattr(meta, "key_type", None))
        found["keys"] = repr(list(raw)) if isinstance(raw, dict) else ""
    if not isinstance(raw, (dict, list)):
        found["raw"] = f"{name_of(type(raw))} {text_of(raw)}"
        found["resolved"] = attempt(lambda: node._dereference_node()._value())
    return found


def nodes(root: Node) -> dict[str, dict[str, str]]:
    """Full key to facts, for each node below `root`."""
    return {node._get_full_key(""): facts(node) for node in tree(root)}


def rank() -> str:
    """This process's rank, or `basic` where there are none."""
    return os.environ.get("RANK", "basic")


def observe(cfg: DictConfig, **extra: object) -> None:
    """Write everything this process sees to `$DIFF_DUMP_DIR/job<num>_rank<rank>.json`."""
    hydra = HydraConfig.get()
    seen: dict[str, Any] = {
        "cfg": nodes(cfg),
        "yaml": attempt(lambda: OmegaConf.to_yaml(cfg)),
        "container": attempt(lambda: OmegaConf.to_container(cfg, resolve=True)),
        "object": attempt(lambda: OmegaConf.to_object(cfg)),
        "hydra": nodes(hydra),
        "hydra_root": facts(hydra._get_parent()),
        "cwd": os.getcwd(),
        "original_cwd": get_original_cwd(),
        "to_absolute_path": to_absolute_path("data.txt"),
        "output_dir": hydra.runtime.output_dir,
        "job_runtime": str(JobRuntime.instance().get("name")),
        "main": [sys.modules["__main__"].__file__, sys.path[:1]],
        "version_base": str(version.getbase()),
        "global_hydra": str(GlobalHydra.instance().is_initialized()),
        "env": {name: value for name, value in os.environ.items() if name.startswith("FROM_JOB_")},
        "extra": {name: value if isinstance(value, (dict, str)) else text_of(value) for name, value in extra.items()},
    }
    # One artifact a job, as users write them: by rank 0 only, relative to the working or to the run directory.
    if rank() in ("basic", "0"):
        Path("artifact.txt" if hydra.job.chdir else hydra.runtime.output_dir + "/artifact.txt").write_text("done\n")
    dump = Path(os.environ["DIFF_DUMP_DIR"]) / f"job{hydra.job.num}_rank{rank()}.json"
    dump.write_text(json.dumps(seen, indent=1), encoding="ascii")
