# SPDX-License-Identifier: MIT OR Apache-2.0
from datetime import timedelta

from torch._C._distributed_c10d import Backend

class PcieBackend(Backend):
    def __init__(
        self,
        *,
        rank: int,
        size: int,
        timeout_ms: int,
        meeting_timeout_ms: int,
        directory: str,
        local: list[int],
        transport: int,
        endpoint: int,
        ring_bytes: int,
        algorithm: int,
        outer: Backend | None,
        owners: Backend | None,
        shards: int,
        cuda_path: int,
        lanes: int,
    ) -> None: ...
    def leave(self) -> None: ...
    def abort_with(self, why: str) -> None: ...
    def check(self) -> None: ...
    def monitored_barrier(self, timeout: timedelta = ..., wait_all_ranks: bool = False) -> None: ...
    def survivors(self, timeout_ms: int) -> list[int]: ...
    @property
    def host_ranks(self) -> list[int]: ...
    @property
    def spans_hosts(self) -> bool: ...

def leave_all() -> None: ...
def holds_endpoint() -> bool: ...
