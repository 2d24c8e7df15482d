"""Let the converter tests import `weight_files`: importlib mode adds no folders."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
