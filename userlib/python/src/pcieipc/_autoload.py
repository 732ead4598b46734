# SPDX-License-Identifier: MIT OR Apache-2.0
"""What torch calls when it is imported, where it knows autoloading: makes the name `pcie` known, and compiles nothing."""


def register() -> None:
    """Registers the backend's name; the rest is loaded when a group is made."""
    import torch.distributed

    if torch.distributed.is_available():
        from .torch import register_backend

        register_backend()
