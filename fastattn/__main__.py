"""`python -m fastattn` is the command `fastattn`."""

import sys

from fastattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
