"""The energy that the machine says it used."""
