#!/usr/bin/env bash
# Builds the wheel and the sdist into a folder: bash ci/build_dist.sh DIST
set -euo pipefail
dist=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
rm -f "$dist"/attnplug-*
# hatchling is pinned where it is installed; without isolation the build uses that one.
python -m build --no-isolation --outdir "$dist"
