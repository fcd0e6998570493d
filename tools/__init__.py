"""Programs that are started by hand, from the root of the repository; README.md lists them."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests"))  # for `helpers`
