"""The `moet` command: one file a subcommand."""
