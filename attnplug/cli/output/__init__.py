"""The output of the commands: tables, reports, progress, help and JSON. Calls none of the commands."""
