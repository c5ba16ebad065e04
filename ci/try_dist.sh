#!/usr/bin/env bash
# Installs the wheel and the sdist of a folder in two clean environments, and runs the README's first command in each:
# bash ci/try_dist.sh DIST PLACE [wheel|sdist|clone], where PLACE is a folder for the environments of these names.
# `clone` installs a copy of the last commit, without DIST.
# An environment that is there already is used as it is.
set -euo pipefail
dist=$(cd "$1" && pwd)
place=$(mkdir -p "$2" && cd "$2" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
first_line=$(grep -m1 -x "pip install -c constraints.txt -e '\.\[models\]' && attnplug select .*" README.md)

# A user of the wheel has no checkout: only the constraints and the configuration are copied.
try_wheel() {
    test -d "$place/wheel" || "$python" -m venv "$place/wheel"
    mkdir -p "$place/user"
    cp constraints.txt "$place/user"
    cp --parents examples/models/*.json "$place/user"
    wheel=$(echo "$dist"/attnplug-*.whl)
    source "$place/wheel/bin/activate"
    cd "$place/user"
    bash -ec "${first_line/"-e '.[models]'"/"'$wheel[models]'"}"
}

# The sdist is unpacked, and is a checkout for its user.
try_sdist() {
    mkdir -p "$place/source"
    tar -xzf "$dist"/attnplug-*.tar.gz -C "$place/source" --strip-components=1
    try_source sdist
}

try_clone() {
    mkdir -p "$place/source"
    git archive HEAD | tar -x -C "$place/source"
    try_source clone
}

try_source() {
    test -d "$place/$1" || "$python" -m venv "$place/$1"
    source "$place/$1/bin/activate"
    cd "$place/source"
    bash -ec "$first_line"
}

for each in ${3:-wheel sdist}; do
    ("try_$each")
done
