#!/usr/bin/env bash
# The first hour of a new user, without triton: the README's first command in a clone, then a new backend and the steps of its CI.
# bash ci/try_clean.sh PLACE, where PLACE is a folder for clones and environments.
set -euo pipefail
place=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
root=$PWD
export PIP_CONSTRAINT=$root/constraints.txt
python=${PYTHON:-python3}

bash ci/try_dist.sh . "$place" clone
source "$place/clone/bin/activate"
# torch for GPUs brings it on Linux.
pip uninstall --yes triton
cd "$place/source"
bash -ec "$(grep -m1 -o 'attnplug select examples/.*\.json$' README.md)"

cd "$place"
rm -rf attnplug-acme
attnplug new-backend acme | tee told
wheel=$(sed -n 's/^  \(pip wheel .*\)/\1/p' told)
(cd source && bash -ec "$wheel")
deactivate

"$python" -m venv "$place/steps"
source "$place/steps/bin/activate"
bash "$root/ci/template_steps.sh" attnplug-acme
