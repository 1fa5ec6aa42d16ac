"""The subcommands of `halfstep`: each module declares its arguments and defines `run`."""
