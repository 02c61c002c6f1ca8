"""
The bash script of `paceline torch recipe --script FILE`: it builds PyTorch for these cards, this driver and this system.

The script runs on its own and is meant to be read and edited. Its stages leave stamps, so that a second start skips what is done.
Pure, except for write_script. The options come from torch_recipe.py. tests/check/test_torch_script.py runs the script on a stand-in
for PyTorch with the same option names; PyTorch itself was not built with it here (docs/torch.md).
"""

import os
import shlex
import sys
from pathlib import Path

from paceline.check.torch_recipe import NEWEST_TORCH, Recipe, format_options, join
from paceline.errors import PacelineError

SIGNATURE = "Written by `paceline torch recipe --script`."
GIB_PER_JOB = {True: 4, False: 2}  # with CUDA, without; pytorch issue 124018: 4.5 GiB for one CUDA file
GIB_OF_DISK = {True: 40, False: 15}  # sources with submodules, objects and libraries
PYTHON_HEADERS = {
    "apt-get": "python{python}-dev",
    "dnf": "python3-devel",
    "zypper": "python3-devel",
    "pacman": "python",
}
COMPILER = {"apt-get": "g++", "dnf": "gcc-c++", "zypper": "gcc-c++", "pacman": "gcc"}
INSTALLERS = {  # how an os-release NAME begins -> the command that installs a package
    "debian": "apt-get", "ubuntu": "apt-get", "linux mint": "apt-get", "pop!_os": "apt-get", "fedora": "dnf", "red": "dnf",
    "rocky": "dnf", "almalinux": "dnf", "centos": "dnf", "opensuse": "zypper", "sles": "zypper", "arch": "pacman",
    "manjaro": "pacman",
}  # fmt: skip

HEAD = """\
#!/usr/bin/env bash
# Builds PyTorch for {cards}, on {system}, for Python {python}.
# {signature} Start it with `bash {name}`, and again after an interruption or an error:
# finished stages are skipped. Variables before the command change what it does:
#   SOURCE=~/pytorch   uses the source tree that is there
#   PREFIX=~/torch     installs there, and leaves the torch of this Python as it is
#   JOBS=2             compiles so many files at once
set -euo pipefail

VERSION=${{VERSION:-v{torch}.0}}
REPOSITORY=${{REPOSITORY:-https://github.com/pytorch/pytorch}}
SOURCE=$(realpath -m "${{SOURCE:-pytorch}}")
BUILD=$SOURCE/build # where PyTorch's own install step looks for what is compiled
STATE=$SOURCE-stages # one stamp and one log for each stage; without this folder all stages start over
PYTHON=${{PYTHON:-{executable}}}
PREFIX=${{PREFIX:-}} # empty: replaces the torch of $PYTHON

# A compiler needs up to {job_gib} GiB; more of them at once than fit into memory get killed.
memory_gib=$(awk '/^MemAvailable:/ {{ print int($2 / 1048576) }}' /proc/meminfo)
JOBS=${{JOBS:-$((memory_gib / {job_gib} < $(nproc) ? memory_gib / {job_gib} : $(nproc)))}}
((JOBS > 0)) || JOBS=1

OPTIONS=(
{options}
)
# PyTorch's install step reads the options from the environment.
export "${{OPTIONS[@]?}}" MAX_JOBS="$JOBS" CMAKE_GENERATOR=Ninja
# Headers of another libuv there would come before PyTorch's own.
unset CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH CFLAGS CXXFLAGS CPPFLAGS
PATH=$(dirname "$PYTHON"):{cuda_path}$PATH

fail() {{ # MESSAGE FIX
  printf 'error: %s\\n  fix: %s\\n' "$1" "$2"
  exit 1
}}
"""

SOURCES = """
get_sources() {
  if [[ ! -e $SOURCE ]]; then
    git clone --branch "$VERSION" --depth 1 "$REPOSITORY" "$SOURCE"
  fi
  if [[ ! -f $SOURCE/CMakeLists.txt || ! -d $SOURCE/torch ]]; then
    fail "$SOURCE is not a PyTorch source tree" "SOURCE=another folder, or mv '$SOURCE' '$SOURCE.old'"
  fi
  if [[ -e $SOURCE/.git ]]; then # a release archive has its submodules and no .git
    git -C "$SOURCE" submodule update --init --recursive --depth 1 --jobs 4
  fi
"""
NCCL_SOURCES = """\
  # NCCL's version is pinned by a file; its sources must be there before CMake runs.
  if [[ -f $SOURCE/tools/optional_submodules.py && -z $(ls -A "$SOURCE/third_party/nccl" 2> /dev/null) ]]; then
    (cd "$SOURCE" && "$PYTHON" tools/optional_submodules.py checkout_nccl)
  fi
"""

DEPENDENCIES = """}}

get_dependencies() {{
  local headers free_gib
  headers=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  if ! command -v c++ > /dev/null || [[ ! -f $headers/Python.h ]]; then
    fail "a C++ compiler and $headers/Python.h are needed" "{packages}"
  fi
{nvcc}  free_gib=$(df --output=avail -BG "$SOURCE" | tail -1 | tr -dc 0-9)
  if [[ ! -d $BUILD ]] && ((free_gib < {disk_gib})); then
    fail "$free_gib GiB are free at $SOURCE, a build needs {disk_gib}" "SOURCE=a folder on a larger disk"
  fi
  # What pyproject.toml needs for a build; cmake and ninja may come from the system as well.
  "$PYTHON" - "$SOURCE/pyproject.toml" > "$STATE/requirements.txt" << 'END'
import re, shutil, sys, tomllib
needed = tomllib.load(open(sys.argv[1], "rb"))["build-system"]["requires"]
names = {{line: re.match(r"[\\w.-]+", line)[0] for line in needed}}
print(*(line for line in needed if not (names[line] in ("cmake", "ninja") and shutil.which(names[line]))), sep="\\n")
END
  "$PYTHON" -m pip install --requirement "$STATE/requirements.txt"
}}
"""
NVCC = """\
  local arch archs=({archs}) known toolkit="CUDA {toolkit}: https://developer.nvidia.com/cuda-toolkit-archive"
  command -v nvcc > /dev/null || fail "nvcc is needed, and there is none" "install $toolkit, or set CUDA_HOME"
  known=$(nvcc --list-gpu-arch)
  for arch in "${{archs[@]}}"; do
    grep -qx "compute_$arch" <<< "$known" || fail "this nvcc does not compile for compute_$arch" "install $toolkit"
  done
"""

STAGES = """
configure() {
  local option
  cmake -S "$SOURCE" -B "$BUILD" -G Ninja "${OPTIONS[@]/#/-D}" -DPython_EXECUTABLE="$PYTHON" \\
    -DCMAKE_INSTALL_PREFIX="$SOURCE/torch" \\
    -DCMAKE_PREFIX_PATH="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  # CMake switches an option off without a message when what it depends on is off; the cache then has it as INTERNAL.
  for option in "${OPTIONS[@]}"; do
    if [[ $option == *=ON ]] && ! grep -Eq "^${option%=ON}:(BOOL|UNINITIALIZED)=(ON|1|TRUE)$" "$BUILD/CMakeCache.txt"; then
      fail "CMake did not accept $option" "read what CMake printed about it above"
    fi
  done
  if ! grep -q TORCH_USE_LIBUV "$BUILD/build.ninja"; then
    fail "no file is compiled with TORCH_USE_LIBUV: this torch would have no libuv" "another VERSION; see docs/torch.md"
  fi
}

compile() {
  ninja -C "$BUILD" -j "$JOBS"
}

install_torch() {
  local pip=("$PYTHON" -m pip install --verbose --no-build-isolation --no-deps)
  if [[ -n $PREFIX ]]; then
    pip+=(--prefix "$PREFIX" --ignore-installed) # otherwise pip would remove the torch of $PYTHON
  fi
  if grep -q scikit_build_core "$SOURCE/pyproject.toml"; then # PyTorch 2.14 and later
    pip+=(--config-settings "build-dir=$BUILD")
  fi
  "${pip[@]}" "$SOURCE"
}

# Runs a stage, unless it was completed with the same settings; its output goes to the screen and to a log.
stage() { # FUNCTION SETTINGS
  current=$1
  if [[ -f $STATE/$1.done && $(< "$STATE/$1.done") == "$2" ]]; then
    echo "== $1: skipped, it was completed before"
    return
  fi
  rm -f "$STATE/$1.done"
  echo "== $1: log $STATE/$1.log"
  "$1" 2>&1 | tee "$STATE/$1.log"
  printf '%s' "$2" > "$STATE/$1.done"
}

report_end() {
  local status=$?
  if ((status != 0)); then
    echo "== $current failed with exit code $status; its log: $STATE/$current.log" >&2
    if grep -Eqs 'Killed|signal 9|signal terminated' "$STATE/$current.log"; then
      echo "   the memory for $JOBS compilers at once was missing: start again with JOBS=$(((JOBS + 1) / 2))" >&2
    else
      echo "   start this script again to continue with this stage" >&2
    fi
  fi
}

mkdir -p "$STATE"
current=start
trap report_end EXIT
exec 9> "$STATE/lock" # held by every process of the build
flock --nonblock 9 || { echo "error: another build runs in $SOURCE" >&2; exit 1; }

stage get_sources "$VERSION"
stage get_dependencies "$PYTHON"
stage configure "$PYTHON ${OPTIONS[*]}"
stage compile "$PYTHON ${OPTIONS[*]}"
stage install_torch "$PYTHON ${OPTIONS[*]} $PREFIX"
current=check
"""
CHECK = """\
installed=${{PREFIX:-$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')}}
{python} -m paceline.cli torch check --path "$installed" 2>&1 | tee "$STATE/check.log"
"""


def write_script(path: Path, recipe: Recipe, *, system: str) -> None:
    """Writes the build script of a recipe. Raises PacelineError for a driver that is too old, and for a file of the user's."""
    if recipe.kind == "driver":
        raise PacelineError(f"the build needs {recipe.command}: {recipe.why}", fix="update the driver first")
    path = path.expanduser()
    try:
        if path.exists() and SIGNATURE not in path.read_text(encoding="utf-8", errors="replace"):
            raise PacelineError(f"{path} exists, and paceline did not write it", fix="--script another file")
        path.write_text(make_script(recipe, system=system, name=path.name), encoding="utf-8")
        path.chmod(0o755)
    except OSError as error:
        raise PacelineError(f"{path} cannot be written: {error.strerror}", fix="--script another file") from error


def make_script(recipe: Recipe, *, system: str, name: str = "build.sh") -> str:
    """Returns the script. system: name and version of the operating system, as facts have it."""
    cuda = bool(recipe.capabilities)
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    cards = f"GPUs of capability {join(recipe.capabilities)}" if cuda else "the CPU alone"
    options = format_options(recipe.options, write=shlex.quote, before_why=" # ")
    head = HEAD.format(
        cards=f"{cards} (driver {recipe.driver})" if cuda and recipe.driver else cards,
        system=f"{system} {recipe.machine}",
        python=python,
        signature=SIGNATURE,
        name=shlex.quote(name),
        torch=NEWEST_TORCH,
        executable=shlex.quote(sys.executable),
        job_gib=GIB_PER_JOB[cuda],
        options="\n".join(f"  {line}" for line in options),
        cuda_path="${CUDA_HOME:-/usr/local/cuda}/bin:" if cuda else "",
    )
    archs = " ".join(f"{major}{minor}" for major, minor in recipe.capabilities)
    nvcc = NVCC.format(toolkit=recipe.toolkit, archs=archs) if cuda else ""
    dependencies = DEPENDENCIES.format(packages=install_command(system, python), nvcc=nvcc, disk_gib=GIB_OF_DISK[cuda])
    check = CHECK.format(python=shlex.quote(sys.executable))
    return head + SOURCES + (NCCL_SOURCES if cuda else "") + dependencies + STAGES + check


def install_command(system: str, python: str) -> str:
    installer = next((command for name, command in INSTALLERS.items() if system.lower().startswith(name)), None)
    if installer is None:
        return f"install g++ and the headers of Python {python}"
    packages = f"git {COMPILER[installer]} {PYTHON_HEADERS[installer].format(python=python)}"
    verb = "-S --needed" if installer == "pacman" else "install -y"
    return f"{'' if os.geteuid() == 0 else 'sudo '}{installer} {verb} {packages}"
