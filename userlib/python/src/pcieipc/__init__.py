# SPDX-License-Identifier: MIT OR Apache-2.0
"""Exchange and all-reduce gradients between the processes of one host, and keep going when PCIe misbehaves.

    import numpy, pcieipc

    with pcieipc.Communicator("/run/user/1000/my-group", rank=0, ranks=4) as group:
        gradients = numpy.ones(1 << 20, "f4")
        group.all_reduce(gradients)

Every call returns the right result or raises one of the exceptions below, within its timeout. ``import pcieipc.torch`` registers the
backend ``pcie`` with torch.distributed.
"""

from ._native import library_version
from .communicator import Agreement, Buffer, Communicator
from .cuda import CudaCommunicator
from .errors import (
    Aborted,
    ArgumentError,
    Corrupt,
    DeviceError,
    EndpointGone,
    EndpointRecovering,
    Error,
    InternalError,
    LinkDegraded,
    MeetingError,
    Mismatch,
    PeerDied,
    SystemCallError,
    Timeout,
)
from .tree import endpoints, events, findings, topology

__version__ = library_version()

__all__ = [
    "Aborted",
    "Agreement",
    "ArgumentError",
    "Buffer",
    "Communicator",
    "Corrupt",
    "CudaCommunicator",
    "DeviceError",
    "EndpointGone",
    "EndpointRecovering",
    "Error",
    "InternalError",
    "LinkDegraded",
    "MeetingError",
    "Mismatch",
    "PeerDied",
    "SystemCallError",
    "Timeout",
    "endpoints",
    "events",
    "findings",
    "topology",
]
