"""The one error tree. What a user can mend is a `GyreError`; what only we can mend is an `assert`.

`ConfigError` carries the dotted key, what was wanted, what was given and how to mend it, so that every
speaker prints the same four facts. Errors of the outside world are raised `from` the original.
"""


class GyreError(Exception):
    """Base of everything gyre raises on purpose. `exit_code` is what the program ends with."""

    exit_code = 1


class ConfigError(GyreError):
    """A setting the user can mend. Exit code 2."""

    exit_code = 2

    def __init__(self, key: str, *, wanted: str, given: object, fix: str = "") -> None:
        self.key, self.wanted, self.given, self.fix = key, wanted, given, fix
        text = f"{key}: wanted {wanted}, given {given!r}"
        super().__init__(f"{text}; {fix}" if fix else text)


class PlacementError(GyreError):
    """The facts of the ranks do not fit the configuration, or the ranks disagree. Names the ranks."""

    exit_code = 2


class TransitionError(GyreError):
    """An event that the cell's transition table does not allow. Carries the cell's story."""


class DeadlineError(GyreError):
    """A wait ran out. Names the wait, the seconds and who was missing."""

    def __init__(self, wait: str, *, seconds: float, missing: str = "") -> None:
        self.wait, self.seconds, self.missing = wait, seconds, missing
        tail = f"; missing: {missing}" if missing else ""
        super().__init__(f"{wait} did not end within {seconds:g} s{tail}")


class EngineError(GyreError):
    """The engine refused or failed an operation, or does not answer its probe."""


class TaskError(GyreError):
    """A task folder that cannot be used. Names the folder, the field and the reason."""


class SandboxError(GyreError):
    """A sandbox could not be started, entered or copied from."""


class EvaluationError(GyreError):
    """Grading failed (not: graded as zero). It may be retried from the snapshot."""


class StoreError(GyreError):
    """The run store is damaged, locked by a living run, or of another schema."""


class TransportError(GyreError):
    """A pull that could not be completed whole: gone, released, another generation, or too late."""


class RunError(GyreError):
    """The run cannot go on. Names the rank, cell or process at fault."""
