"""`python -m loops` is the command `halfstep`, but imports TensorFlow even for its help."""

import sys

from halfstep.command import main

sys.exit(main())
