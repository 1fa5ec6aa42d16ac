"""Makes `python -m halfstep` run the command."""

import sys

from halfstep.command import main

sys.exit(main())
