"""Makes `python -m halfstep` run the command."""

import sys

from halfstep import main

sys.exit(main())
