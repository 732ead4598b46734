# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a call raises instead of giving a result."""

from __future__ import annotations


class Error(RuntimeError):
    """A call that did not give its result. The text says who, what, and what to do.

    ``rank`` is the rank that it is about (that died, is late, disagrees, called abort), ``endpoint`` the module's id of the endpoint that
    it is about and ``generation`` the life of it that was in use; each is None where the error has none.
    """

    status = "Internal"

    def __init__(self, message: str, rank: int | None = None, endpoint: int | None = None, generation: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.endpoint = endpoint
        self.generation = generation

    def __reduce__(self) -> tuple[type[Error], tuple[str, int | None, int | None, int | None]]:
        return type(self), (self.args[0], self.rank, self.endpoint, self.generation)


class Timeout(Error, TimeoutError):
    """The deadline passed while the other rank was alive."""

    status = "Timeout"


class PeerDied(Error):
    """The process of a rank has ended."""

    status = "PeerDied"


class EndpointRecovering(Error):
    """An endpoint is recovering from a PCIe error."""

    status = "EndpointRecovering"


class EndpointGone(Error):
    """An endpoint was removed, unbound or is dead."""

    status = "EndpointGone"


class LinkDegraded(Error):
    """A link trained below what it was."""

    status = "LinkDegraded"


class Mismatch(Error):
    """Ranks disagree on size, type, operation or configuration."""

    status = "Mismatch"


class Corrupt(Error):
    """A record or an index from another rank broke the protocol; the data of this call must not be used."""

    status = "Corrupt"


class Aborted(Error):
    """Somebody called abort, or left the group."""

    status = "Aborted"


class ArgumentError(Error, ValueError):
    """The arguments can not be served."""

    status = "Argument"


class MeetingError(Error):
    """The group could not meet."""

    status = "Meeting"


class DeviceError(Error):
    """The module or an endpoint refused."""

    status = "Device"


class SystemCallError(Error):
    """A system call failed."""

    status = "System"


class InternalError(Error):
    """A bug in the library; please report it."""

    status = "Internal"


BY_STATUS: dict[str, type[Error]] = {
    kind.status: kind
    for kind in (
        Timeout,
        PeerDied,
        EndpointRecovering,
        EndpointGone,
        LinkDegraded,
        Mismatch,
        Corrupt,
        Aborted,
        ArgumentError,
        MeetingError,
        DeviceError,
        SystemCallError,
        InternalError,
    )
}


def make(status: str, message: str, rank: int = -1, endpoint: int = -1, generation: int = 0) -> Error:
    """The exception for a status of the library; numbers below 0 stand for none."""
    kind = BY_STATUS.get(status, InternalError)
    has_endpoint = endpoint >= 0
    return kind(message, rank if rank >= 0 else None, endpoint if has_endpoint else None, generation if has_endpoint else None)
