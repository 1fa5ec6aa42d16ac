#!/bin/sh
# Uses the wheel in dist/ as a stranger does, in a new environment outside of the checkout:
# outside.sh PYTHON CONSTRAINTS
set -eu
cd "$(dirname "$0")/../.."
here=$PWD
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

"$1" -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check --constraint "$2" \
    "$(echo "$here"/dist/halfstep-*.whl)[study,trace]"
# The oldest versions are of what runs; a type checker is of today.
"$place/venv/bin/pip" install --quiet --disable-pip-version-check "$(grep '^mypy==' constraints.txt)"

mkdir "$place/user"
cp README.md tests/markdown_blocks.py tests/packaging/typed.py tests/packaging/mistyped.py "$place/user"
cd "$place/user"
PATH="$place/venv/bin:$PATH"
unset PYTHONPATH

said() { printf '\n== %s\n' "$*"; }

said "$(halfstep --version)"
python -c "import halfstep, loops, scaler, sys; assert all(one.__file__.startswith(sys.prefix) for one in (halfstep, loops, scaler))"
said the example of the README
python -c "import pathlib, markdown_blocks as m; m.run_blocks(pathlib.Path('README.md').read_text(), pathlib.Path('.'))"
said halfstep doctor
halfstep doctor
said halfstep train
halfstep train digits --steps 20
said mypy
mypy --strict typed.py
mistakes=$(mypy --strict mistyped.py || true)
echo "$mistakes"
case $mistakes in
*"Found 5 errors"*) ;;
*)
    echo "expected the five mistakes in mistyped.py: the types of the wheel are not seen." >&2
    exit 1
    ;;
esac
said "all of it works with $(halfstep --version)"
