"""`python -m moet.bench [--check]`, in the checkout's root: renders the tables of the docs."""

from __future__ import annotations

import sys
from pathlib import Path

from moet.bench.definitions import TABLES
from moet.bench.tables import update


def main(arguments: list[str]) -> int:
    check, stale = "--check" in arguments, []
    for path in [Path("README.md"), *sorted(Path("docs").glob("*.md"))]:
        page = path.read_text()
        fresh = update(page, TABLES)
        if fresh != page:
            stale.append(str(path))
            if not check:
                path.write_text(fresh)
    if check and stale:
        print(f"tables differ from bench/results in {', '.join(stale)}: run `make tables`.")
        return 1
    print(f"rewrote {', '.join(stale)}" if stale else "tables are up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
