#!/usr/bin/env bash
# Runs the steps of a package's CI, as `attnplug new-backend` writes it, in the active environment: bash ci/template_steps.sh PACKAGE
set -euo pipefail
cd "$1"
sed -n 's/^ *- run: //p' .github/workflows/ci.yml | while IFS= read -r step; do
    echo "+ $step"
    bash -ec "$step" </dev/null
done
