# PYTHON_ARGCOMPLETE_OK
"""The command `gradsieve` hands over to gradsieve-tools, which a training does not need."""

import sys


def main() -> int:
    try:
        from gradsieve_tools.cli.main import main as tools
    except ModuleNotFoundError as error:
        if error.name != "gradsieve_tools":
            raise
        print(
            "gradsieve: the command needs gradsieve-tools, on no index yet: pip install ./tools in a clone",
            file=sys.stderr,
        )
        return 2
    return tools()
