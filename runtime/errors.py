"""The error family of the project: one line that says what, where, expected, found and the remedy.

All of them are ``ValueError``s, so a caller who only wants "the input was wrong" catches that. The builder re-exports
these very classes, so a bundle error is the same class on both sides.
"""

from __future__ import annotations

from typing import Self


class DSparkError(ValueError):
    """Base of every error a user can cause or mend.

    Args:
        where: the file, field, tensor or argument at fault.
        problem: what is wrong with it, as a short clause.
        expected: what would have been right (omitted where `problem` says it).
        found: what was there instead.
        remedy: what the user can do about it, without a full stop.

    ``str(error)`` is one line: ``where: problem; expected …; found …. remedy``.
    """

    def __init__(
        self,
        where: object,
        problem: str,
        *,
        expected: object = None,
        found: object = None,
        remedy: str | None = None,
    ) -> None:
        self.where = str(where)
        self.problem = problem
        self.expected = None if expected is None else str(expected)
        self.found = None if found is None else str(found)
        self.remedy = remedy
        clauses = [problem]
        if self.expected is not None:
            clauses.append(f"expected {self.expected}")
        if self.found is not None:
            clauses.append(f"found {self.found}")
        line = f"{self.where}: " + "; ".join(clauses)
        if remedy:
            line += f". {remedy}"
        super().__init__(" ".join(line.split()))

    def at(self, where: str) -> Self:
        """The same error, said of a place further out: ``where: inner place: problem …``."""
        return type(self)(
            f"{where}: {self.where}", self.problem, expected=self.expected, found=self.found, remedy=self.remedy
        )


class CheckpointError(DSparkError):
    """A target or drafter checkpoint that can't be read as one."""


class ProfileError(DSparkError):
    """A build option or profile value that is out of its bounds, or doesn't fit the checkpoints or the machine."""


class BundleError(DSparkError):
    """A bundle that is incomplete, altered, of another version, or not a bundle at all."""


class MemoryShortage(BundleError):
    """A bundle that needs more memory than this machine, or its GPU, has free."""


class BackendUnavailable(DSparkError):
    """An inference library, device or architecture that a bundle needs and this machine lacks."""


class RequestError(DSparkError):
    """A request (or a single draft or verify call) that the engine can't serve."""


class QueueFull(RequestError):
    """A request that came while as many were waiting as the engine lets wait: try again later."""


class ServingError(DSparkError):
    """A request that failed while it was served; ``__cause__`` is what was raised. Other requests go on."""


class PluginWarning(UserWarning):
    """Kernels are missing: standard operators run in their place, slower."""
