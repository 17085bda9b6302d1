"""The commands of ``digenrl``, one file each; nothing heavy is imported until one runs."""
