"""The commands of `attnplug`, one file each; `attnplug.cli.app` calls in, and they call `output`."""
