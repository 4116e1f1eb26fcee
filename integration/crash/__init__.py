"""Crash bundles: the update at which a bad number ended a run, recorded, written, and executed again."""
