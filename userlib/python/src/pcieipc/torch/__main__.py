# SPDX-License-Identifier: MIT OR Apache-2.0
"""`python -m pcieipc.torch` compiles the backend now, instead of when the first group is made, and says where it is."""

import sys

from ._build import NotBuilt, build

if __name__ == "__main__":
    try:
        print(build())
    except NotBuilt as error:
        sys.exit(str(error))
