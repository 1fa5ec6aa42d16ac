"""The commands of `halfstep`: what each takes, and the function that runs it."""
