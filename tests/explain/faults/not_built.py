"""A package with a compiled part is imported from its sources, where that part was never built."""

import sys
from pathlib import Path

from job import start

start()
package = Path("fastops")
package.mkdir(exist_ok=True)
(package / "__init__.py").write_text({"module": "import fastops._C\n", "name": "from fastops import _C\n"}[sys.argv[1]])
sys.path.insert(0, ".")
import fastops  # noqa: E402, F401
