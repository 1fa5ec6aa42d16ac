#!/bin/sh
# Prints a Python of the first of these versions that the machine has, on PATH or pyenv's: python.sh 3.10 3.11
for version in "$@"; do
    for python in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
        # A shim of pyenv may stand on PATH without a Python behind it, and Debian's may lack what makes environments.
        if "$python" -c "import ensurepip" 2>/dev/null; then
            echo "$python"
            exit
        fi
    done
done
echo "No Python $* was found. ${PYTHON:-python3} runs instead: $(${PYTHON:-python3} --version)." >&2
echo "${PYTHON:-python3}"
