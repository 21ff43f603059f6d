"""Families: one a file, named as its model_type, its `FAMILY` all that zoo knows of it. See `zoo.hf` for how to add
one."""
