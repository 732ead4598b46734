# SPDX-License-Identifier: MIT OR Apache-2.0
"""What torch calls when it is imported, where it knows autoloading: makes the name `pcie` known, and compiles nothing."""

import sys


def register() -> None:
    """Registers the backend's name; the rest is loaded when a group is made."""
    import torch.distributed

    loading = sys.modules.get("pcieipc.torch")
    if loading is not None and not hasattr(loading, "register_backend"):
        # It is what imports torch; at its end it registers the name itself.
        return
    if torch.distributed.is_available():
        from .torch import register_backend

        register_backend()
