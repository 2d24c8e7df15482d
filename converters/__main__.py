"""`python -m converters`: the verbs about weight files, without the engine."""

import signal
import sys

from converters.cli import main

if hasattr(signal, "SIGPIPE"):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends us quietly
sys.exit(main())
