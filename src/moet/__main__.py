"""`python -m moet`: the same as the `moet` command."""

from moet.cli.main import main

main()
