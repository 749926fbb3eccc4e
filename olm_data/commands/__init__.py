"""The commands of `olm-data`, a file each: options, a call of the verb, and what is printed."""
