"""A job on its way to a cluster: all that its nodes need, free of Hydra."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ._specs import JOB_ID_TOKEN, Payload
from ._start import JobStart


@dataclass(frozen=True)
class SubmittedJob:
    """A job as it is submitted. Where its id on the cluster belongs, JOB_ID_TOKEN stands.

    Attributes:
        start: Its start, but for what the first node decides.
        payload: What its ranks will read.
        config_yaml: Its own config, not resolved.
        folder: Where its nodes and the launching process meet, absolute.
        first_attempt: How often it was started before it was submitted.
        master_addr: That option.
        master_port: That option.
        omp_num_threads: That option.
        seed: PL_GLOBAL_SEED of the environment in which the launching process was started; None: there was none.
    """

    start: JobStart
    payload: Payload
    config_yaml: str
    folder: str
    first_attempt: int
    master_addr: str | None
    master_port: int | None
    omp_num_threads: int | None
    seed: str | None

    def settled(self, job_id: str) -> SubmittedJob:
        """Return the job with its id.

        Args:
            job_id: On the cluster.
        """

        def settle(text: str) -> str:
            return text.replace(JOB_ID_TOKEN, job_id)

        start = self.start
        group = replace(start.group, folder=settle(start.group.folder), sweep_dir=settle(start.group.sweep_dir))
        return replace(
            self,
            start=replace(
                start,
                run_dir=settle(start.run_dir),
                argv=tuple(map(settle, start.argv)),
                env_set={name: settle(value) for name, value in start.env_set.items()},
                group=group,
            ),
            payload=replace(self.payload, run_dir=settle(self.payload.run_dir), job_id=job_id),
        )
