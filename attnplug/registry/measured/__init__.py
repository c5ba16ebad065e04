"""Tables of measured times: their files, their rows, and what a selection reads of them.

`selection` ranks by them, `attnplug.tuning` writes them. Calls into `plugins` alone.
"""
