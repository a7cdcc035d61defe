"""How long the processes of a job wait for each other."""

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds; each is read from the environment if it is there, as `TORCH_SHARD_SILENT_S`.

    Attributes:
        beat: From one sign of life to the next.
        silent: A process that gives none for so long counts as gone.
        grace: A process whose peer has failed has so long to come back from what it waits for.
        notice: Process 0 says this often that others wait for one.
        wait: So long they wait for one that is alive.
        connect: To reach process 0 at the beginning.
    """

    beat: float = 0.5
    silent: float = 25.0
    grace: float = 5.0
    notice: float = 30.0
    wait: float = 1800.0
    connect: float = 30.0

    @classmethod
    def of_environment(cls) -> "Times":
        """Give the defaults, and what the environment says otherwise."""
        names = (field.name for field in dataclasses.fields(cls))
        given = {name: os.environ.get(f"TORCH_SHARD_{name.upper()}_S") for name in names}
        return cls(**{name: float(value) for name, value in given.items() if value is not None})
