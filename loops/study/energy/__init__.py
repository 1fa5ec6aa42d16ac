"""The energy that the machine reports."""
