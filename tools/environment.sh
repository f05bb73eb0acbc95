# The virtual environment of this checkout; read by tools/test and tools/demo, not run by itself.
#
#   install EXTRAS   makes .venv and installs the package with these extras, editable; does nothing where that is done
#   say TEXT         one line of what happens now
#
# Sets `root` (the checkout) and `python` (the environment's interpreter). Everything that is written lies in the
# checkout: caches and the home folder of what runs later go below .venv, temporary files too while pip works.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="$root/.venv/bin/python"

say() { printf '\n==> %s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

supported() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        if supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 to 3.14 with the venv module (tried: ${PYTHON:-python3, python3.13, python3.12, python3.11," \
        "python3.14}). Install one (Debian, Ubuntu: apt install python3 python3-venv), or name one: PYTHON=/path/to/python"
}

install() {
    local extras="$1" base stamp wanted
    if ! [ -x "$python" ] || ! supported "$python"; then
        base="$(find_python)"
        say "Making .venv with $("$base" --version) ($base)"
        "$base" -m venv --clear "$root/.venv"
    fi
    # The same interpreter and the same pyproject.toml need no second install. The checkout's path counts as well:
    # an editable install points to it.
    stamp="$root/.venv/installed-${extras//,/-}"
    wanted="$root $("$python" --version) $(cksum <"$root/pyproject.toml")"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        say "Using .venv, which has fastdata[$extras]"
    else
        say "Installing fastdata[$extras] into .venv (PyTorch alone is several GB: minutes on a fast network)"
        mkdir -p "$root/.venv/tmp"
        # No cache: it would keep gigabytes of wheels. No byte code: Python writes what is used when it is first used.
        TMPDIR="$root/.venv/tmp" "$python" -m pip install --disable-pip-version-check --no-cache-dir --no-compile \
            --editable "$root[$extras]"
        "$python" -m pip check --disable-pip-version-check
        # torchvision's compiled part works with the very torch it was built for only, and two builds of one version
        # (CPU, CUDA) look alike to an installer.
        "$python" -c 'import torchvision' || fail "torch and torchvision in .venv do not fit together:" \
            "$("$python" -m pip list 2>/dev/null | grep -E '^torch(vision)? ' | tr -s ' \n' ' ')" \
            "Both must come from one package index; put that right, remove .venv and run this again."
        printf '%s' "$wanted" >"$stamp"
    fi
    keep_inside
}

# Programs that run from here on find a home and caches inside the checkout. Their temporary folder is a short path of
# the system's, removed at the end: paths of sockets in it may have 107 bytes, which a deep checkout would exceed.
keep_inside() {
    export HOME="$root/.venv/home"
    export XDG_CACHE_HOME="$HOME/.cache" XDG_CONFIG_HOME="$HOME/.config" XDG_DATA_HOME="$HOME/.local/share"
    export HF_HOME="$XDG_CACHE_HOME/huggingface" TORCH_HOME="$XDG_CACHE_HOME/torch" CUDA_CACHE_PATH="$HOME/.nv"
    export TRITON_HOME="$HOME" TORCHINDUCTOR_CACHE_DIR="$XDG_CACHE_HOME/inductor"
    unset NUMBA_CACHE_DIR PYTHONPYCACHEPREFIX
    mkdir -p "$XDG_CACHE_HOME" "$XDG_CONFIG_HOME" "$XDG_DATA_HOME"
    TMPDIR="$(mktemp -d)"
    export TMPDIR
    trap 'rm -rf -- "$TMPDIR"' EXIT
}
