"""`python -m loops` is the command `halfstep`."""

import sys

from loops.cli import main

sys.exit(main())
