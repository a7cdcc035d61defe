"""Entries by name: what a module holds, which mesh, which plan splits it how, which entries are stacked. Pure."""
