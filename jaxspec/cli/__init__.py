"""The command line: one verb a subcommand, one file a verb."""
