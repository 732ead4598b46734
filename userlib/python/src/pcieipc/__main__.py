# SPDX-License-Identifier: MIT OR Apache-2.0
"""`python -m pcieipc` is the pcieipc command."""

import os
import sys

from .tree import command_path


def main() -> None:
    """Becomes the command."""
    command = str(command_path())
    try:
        os.execv(command, [command, *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"{command} can not be run: {error}")


if __name__ == "__main__":
    main()
