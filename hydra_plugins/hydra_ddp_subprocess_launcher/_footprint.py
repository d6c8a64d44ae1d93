"""What a sweeper writes before it launches, and how a dry run takes it back."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from ._errors import StartError


@dataclass(frozen=True)
class Footprint:
    """What was at the place of a sweep directory before the sweeper wrote there.

    Hydra's sweepers make the directory and write the sweep's config into it before they call the launcher.

    Attributes:
        written: The file that they write.
        content: What it held; None: it was not there.
        times_ns: When it was last read and written, nanoseconds.
        missing: Directories that were not there, innermost first.
    """

    written: Path
    content: bytes | None
    times_ns: tuple[int, int]
    missing: tuple[Path, ...]

    @classmethod
    def look(cls, sweep_dir: str) -> Footprint:
        """Take down what is there now.

        Raises:
            StartError: when a file is there that cannot be read, and so could not be put back.
        """
        folder = Path(os.path.abspath(sweep_dir))
        written = folder / "multirun.yaml"
        missing = tuple(directory for directory in (folder, *folder.parents) if not directory.exists())
        try:
            status = written.stat()
            return cls(written, written.read_bytes(), (status.st_atime_ns, status.st_mtime_ns), missing)
        except (FileNotFoundError, NotADirectoryError):
            return cls(written, None, (0, 0), missing)
        except OSError as error:
            raise StartError(
                f"A dry run could not put back {written}, which cannot be read: {error.strerror}. Make it readable, or "
                "choose another hydra.sweep.dir."
            ) from None

    def restore(self) -> None:
        """Have it as it was; directories into which somebody else has written stay. May be called twice."""
        if self.content is None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self.written.unlink()
        else:
            if self.written.read_bytes() != self.content:
                self.written.write_bytes(self.content)
            os.utime(self.written, ns=self.times_ns)
        for directory in self.missing:
            with contextlib.suppress(OSError):
                directory.rmdir()
