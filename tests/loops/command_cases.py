"""What a command prints, and its status."""

import json

import halfstep as cli


def run(capsys, *arguments):
    """The status, standard output and standard error of a command."""
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as exit:
        status = exit.code
    output = capsys.readouterr()
    return status, output.out, output.err


def strict(text):
    """What JSON says that has no NaN or infinity."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)
