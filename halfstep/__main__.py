"""`python -m halfstep` is the command."""

import sys

from halfstep import main

sys.exit(main())
