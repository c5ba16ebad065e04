"""What the commands print: tables, reports, progress, help and JSON. Calls none of the commands."""
