"""Why a step was skipped: found by taking it again under full observation, and by trying what may help."""
