"""`python -m loops` is the command `halfstep`."""

import sys

from halfstep import main

sys.exit(main())
