#!/bin/sh
# Runs the core of the tests in an environment: core.sh .venv-oldest [PYTEST OPTION ...]
cd "$(dirname "$0")/../.." || exit
environment=$1
shift
exec "$environment/bin/pytest" -v -rs -m "not exhaustive" -n 2 --dist loadfile "$@" $(grep -v "^#" tests/matrix/core.txt)
