# Sourced by scripts/run and scripts/test, which set `root` to the checkout.

# find_python LOW HIGH: prints the first interpreter from Python 3.LOW to 3.HIGH.
find_python() {
    for candidate in "${PYTHON:-python3}" python3 python3.14 python3.13 python3.12 python3.11 \
        "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/*/bin/python3; do
        "$candidate" -c "
import os, sys
if not (3, $1) <= sys.version_info[:2] <= (3, $2): sys.exit(1)
print(os.path.realpath(sys.executable))" 2>/dev/null && return 0
    done
    return 1
}

# prepare VENV EXTRAS PYTHON: makes the environment or brings it up to date; silent when there is nothing to do.
prepare() {
    "$1/bin/python" "$root/scripts/environment.py" --check "$1" "$2" 2>/dev/null ||
        "$3" "$root/scripts/environment.py" "$1" "$2"
}

# prepare_main EXTRAS: the environment in .venv.
prepare_main() {
    python=$(find_python 11 14) || {
        echo "kimi_jax: no Python 3.11 to 3.14 found (as python3, python3.11 ... python3.14, or under pyenv)." >&2
        echo "  Debian, Ubuntu: apt install python3 python3-venv; or name one: PYTHON=/path/to/python3" >&2
        return 1
    }
    prepare "$root/.venv" "$1" "$python"
}
