#!/usr/bin/env bash
# Builds PyTorch. Start it with bash, and again after an interruption or an error: finished stages are skipped.
# Variables before the command change what it does:
#   SOURCE=~/pytorch   uses the source tree that is there
#   PREFIX=~/torch     installs there, and leaves the torch of this Python as it is
#   JOBS=2             compiles so many files at once
set -euo pipefail

# SETTINGS

REPOSITORY=${REPOSITORY:-https://github.com/pytorch/pytorch}
SOURCE=$(realpath -m "${SOURCE:-pytorch}")
BUILD=$SOURCE/build # where PyTorch's own install step looks for what is compiled
STATE=$SOURCE-stages # one stamp and one log for each stage; without this folder all stages start over
PREFIX=${PREFIX:-} # empty: replaces the torch of $PYTHON

# Compilers that together need more memory than there is get killed.
memory_gib=$(awk '/^MemAvailable:/ { print int($2 / 1048576) }' /proc/meminfo)
JOBS=${JOBS:-$((memory_gib / JOB_GIB < $(nproc) ? memory_gib / JOB_GIB : $(nproc)))}
((JOBS > 0)) || JOBS=1

# PyTorch's install step reads the options from the environment.
export "${OPTIONS[@]?}" MAX_JOBS="$JOBS" CMAKE_GENERATOR=Ninja
# Headers of another libuv there would come before PyTorch's own.
unset CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH CFLAGS CXXFLAGS CPPFLAGS
PATH=$(dirname "$PYTHON"):${ARCHS:+${CUDA_HOME:-/usr/local/cuda}/bin:}$PATH

fail() { # MESSAGE FIX
  printf 'error: %s\n  fix: %s\n' "$1" "$2"
  exit 1
}

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
  # NCCL's version is pinned by a file; its sources must be there before CMake runs.
  if [[ -n $ARCHS && -f $SOURCE/tools/optional_submodules.py && -z $(ls -A "$SOURCE/third_party/nccl" 2> /dev/null) ]]; then
    (cd "$SOURCE" && "$PYTHON" tools/optional_submodules.py checkout_nccl)
  fi
}

get_dependencies() {
  local arch headers free_gib
  headers=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  if ! command -v c++ > /dev/null || [[ ! -f $headers/Python.h ]]; then
    fail "a C++ compiler and $headers/Python.h are needed" "$PACKAGES"
  fi
  for arch in $ARCHS; do
    command -v nvcc > /dev/null || fail "nvcc is needed, and there is none" "install $TOOLKIT, or set CUDA_HOME"
    grep -qx "compute_$arch" <<< "$(nvcc --list-gpu-arch)" || fail "this nvcc does not compile for compute_$arch" "install $TOOLKIT"
  done
  free_gib=$(df --output=avail -BG "$SOURCE" | tail -1 | tr -dc 0-9)
  if [[ ! -d $BUILD ]] && ((free_gib < DISK_GIB)); then
    fail "$free_gib GiB are free at $SOURCE, a build needs $DISK_GIB" "SOURCE=a folder on a larger disk"
  fi
  # What pyproject.toml needs for a build; cmake and ninja may come from the system as well.
  "$PYTHON" - "$SOURCE/pyproject.toml" > "$STATE/requirements.txt" << 'END'
import re, shutil, sys, tomllib
needed = tomllib.load(open(sys.argv[1], "rb"))["build-system"]["requires"]
names = {line: re.match(r"[\w.-]+", line)[0] for line in needed}
print(*(line for line in needed if not (names[line] in ("cmake", "ninja") and shutil.which(names[line]))), sep="\n")
END
  "$PYTHON" -m pip install --requirement "$STATE/requirements.txt"
}

configure() {
  local option
  cmake -S "$SOURCE" -B "$BUILD" -G Ninja "${OPTIONS[@]/#/-D}" -DPython_EXECUTABLE="$PYTHON" \
    -DCMAKE_INSTALL_PREFIX="$SOURCE/torch" \
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
trap 'exit 130' INT # without it bash may end before it runs the line above
exec 9> "$STATE/lock" # held by every process of the build
flock --nonblock 9 || { echo "error: another build runs in $SOURCE" >&2; exit 1; }

stage get_sources "$VERSION"
stage get_dependencies "$PYTHON"
stage configure "$PYTHON ${OPTIONS[*]}"
stage compile "$PYTHON ${OPTIONS[*]}"
stage install_torch "$PYTHON ${OPTIONS[*]} $PREFIX"
current=check
installed=${PREFIX:-$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')}
"$PACELINE_PYTHON" -m paceline.cli torch check --path "$installed" 2>&1 | tee "$STATE/check.log"
