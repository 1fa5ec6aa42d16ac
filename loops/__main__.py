"""`python -m loops` is the command `halfstep`, whose help takes as long as importing TensorFlow does."""

import sys

from halfstep import main

sys.exit(main())
