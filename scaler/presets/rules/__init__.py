"""The state machines behind the presets that `scaler.Dynamic` cannot be, one file each."""
