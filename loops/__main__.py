"""`python -m loops` is the command `halfstep`, but imports TensorFlow even for its help."""

import sys

from loops.support.hiding import check_not_hidden


def _main() -> int:
    check_not_hidden("halfstep")
    from halfstep.command import main

    return main()


sys.exit(_main())
